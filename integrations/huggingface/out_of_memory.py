"""Where memory runs out in a run of the Trainer: batches in pieces, each a micro-batch of the host's; or a checkpoint.

While a piece trains, the trainer says that its window has as many micro-batches as there are pieces: a loss, the
user's too, is then divided as in a run whose micro-batches were smaller from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integrations.contract import Session
from integrations.huggingface import versions
from integrations.huggingface.deepspeed import is_deepspeed
from integrations.huggingface.loss_rules import counting
from integrations.huggingface.loss_scaling import Losses
from integrations.huggingface.patches import Held
from integrations.shared.pieces import whole_or_divided, why_whole


class Pieces:
    """Of one run.

    Args:
        trainer: the host's.
        session: of the run.
        losses: what they are weighed by.
    """

    def __init__(self, trainer: Any, session: Session, losses: Losses) -> None:
        self.trainer, self.session, self.losses = trainer, session, losses

    @property
    def begins_anew(self) -> bool:
        """Where memory runs out the host begins the whole run with a smaller batch."""
        return bool(self.trainer.args.auto_find_batch_size)

    @property
    def guards(self) -> bool:
        """Whether a window may be done again.

        DeepSpeed's engine would take every piece for a micro-batch, and step at the first.
        """
        return not (self.begins_anew or is_deepspeed(self.trainer))

    def of(self, inputs: Any) -> list[Any]:
        """Pieces of a batch, as small as they have to be by now."""
        limit = self.session.rescue.limit
        named = limit is not None and not self.losses.hosts_sums and isinstance(inputs, counting.Mapping)
        return whole_or_divided(inputs, counting.samples(inputs), limit) if named else [inputs]

    def cannot(self, inputs: Any) -> str:
        """Why a batch cannot be divided, or empty."""
        if self.trainer.args.world_size > 1:
            return "several processes, which would wait for each other"
        if self.losses.hosts_sums:
            return "the host's own sums, as with normalise=host, may grow with the number of micro-batches"
        if not isinstance(inputs, counting.Mapping):
            return f"a batch of type {type(inputs).__name__}"
        return why_whole(inputs, counting.samples(inputs))

    @contextmanager
    def as_micro_batches(self, window: int, pieces: int) -> Iterator[None]:
        """Inside, the trainer's window has `window` micro-batches; a full one `pieces` times its argument."""
        if self.session.rescue.limit is None:
            yield
            return
        trainer = self.trainer
        on_trainer, on_arguments = Held(trainer), Held(trainer.args)
        if versions.WINDOW.here:
            on_trainer.value("current_gradient_accumulation_steps", window)
        count = trainer.args.gradient_accumulation_steps * pieces
        on_arguments.value("gradient_accumulation_steps", count, hidden=False)
        try:
            yield
        finally:
            on_arguments.undo()
            on_trainer.undo()

    def around_step(self) -> Held:
        """Around the optimizer's step, where memory may run out too; to be undone at the run's end."""

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.session.rescue.updating():
                return original(*args, **kwargs)

        held = Held(self.trainer.optimizer)
        if self.guards:
            held.method("step", step)
        return held

    def keep(self) -> str:
        """The run cannot go on: save it as it was after its last update, by the host's own means."""
        trainer = self.trainer
        name = f"checkpoint-{trainer.state.global_step}"
        if not trainer.state.global_step:
            return ""
        if not (Path(trainer.args.output_dir) / name).is_dir():
            try:
                trainer._save_checkpoint(trainer.model, None)
            except (OSError, RuntimeError):  # a full disk; what was saved before is whole
                return ""
        return f"saved in {name}"
