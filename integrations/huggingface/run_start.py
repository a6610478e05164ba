"""How a run of the Trainer starts: its checkpoint, its arguments, and its batch after running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from integrations.huggingface import arguments, checkpoint_folders
from integrations.huggingface.deepspeed import is_deepspeed
from integrations.huggingface.patches import Held


class Starting:
    """Replaces `train` and `_inner_training_loop` of one trainer.

    Args:
        trainer: the host's.
        config: the settings.
        seed: seeds every generator with a number.
        say: told, in one line, what the user should know.
        end: undoes what holds for one run.
    """

    def __init__(
        self,
        trainer: Any,
        config: Any,
        seed: Callable[[int], None],
        say: Callable[[str], None],
        end: Callable[[], None],
    ) -> None:
        self.trainer, self.config, self.seed, self.say, self.end = trainer, config, seed, say, end
        self.arguments = Held(trainer.args)
        self._failed_batch = 0

    def train(self, original: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The host's `train`: from the newest complete checkpoint, where it is to find one."""
        trainer = self.trainer
        run = Path(trainer.args.output_dir)
        if trainer.args.should_save and run.is_dir():
            checkpoint_folders.sweep(run)
        trainer.accelerator.wait_for_everyone()
        if resume_from_checkpoint is True:
            found, passed = checkpoint_folders.newest_complete(run) if run.is_dir() else (None, [])
            for line in passed:
                self.say(f"resume_from_checkpoint=True: {line}; an older one is taken")
            resume_from_checkpoint = str(found) if found else True  # the host says that there is none
        try:
            return original(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._failed_batch = 0
            self.end()

    def inner_training_loop(
        self, original: Callable[..., Any], batch_size: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The host's loop, with a batch that keeps the update's samples after running out of memory."""
        trainer = self.trainer
        if trainer.args.auto_find_batch_size and batch_size and not is_deepspeed(trainer):
            batch_size = self._keep_effective_batch(batch_size)
        else:
            self._apply()
        if self.config.seed != "host":
            self.seed(self.config.seed)
        try:
            return original(batch_size, *args, **kwargs)
        except BaseException:
            self._failed_batch = batch_size or 0
            self.end()
            raise

    def _apply(self) -> None:
        """Set what the settings change on the arguments that the trainer has now."""
        self.arguments.undo()
        self.arguments = Held(self.trainer.args)
        arguments.apply(self.trainer, self.config, self.arguments)

    def _keep_effective_batch(self, micro_batch: int) -> int:
        """After an out-of-memory retry: fewer samples a micro-batch, more micro-batches, the same update."""
        trainer = self.trainer
        self._apply()
        wanted = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
        allowed = min(micro_batch, self._failed_batch - 1) if self._failed_batch else micro_batch
        if allowed < 1:
            raise RuntimeError("No executable batch size found, reached zero.")  # the host's own words
        size, accumulate = arguments.same_effective_batch(wanted, allowed)
        if size != trainer.args.train_batch_size:
            self.say(
                f"out of memory: {trainer.args.train_batch_size} x {trainer.args.gradient_accumulation_steps} becomes "
                f"{size} x {accumulate}; an update still has {wanted} samples"
            )
            self.arguments.value("gradient_accumulation_steps", accumulate)
        return size
