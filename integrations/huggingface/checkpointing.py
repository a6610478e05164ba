"""Checkpoints of a Trainer: averaged weights in the host's files, raw ones beside them, folders whole or absent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from integrations.contract import RunState, Session, WeightAverage
from integrations.huggingface import checkpoint_folders, versions
from integrations.huggingface.deepspeed import is_deepspeed
from integrations.huggingface.patches import Held, of_host
from integrations.huggingface.sharding import is_sharded
from integrations.refusal import UnsupportedRun


class Saving:
    """Replaces `save_model` and `_save_checkpoint` for one run, and takes a run up again.

    Args:
        trainer: the host's.
        session: of the run.
        average: the EMA, or None.
    """

    def __init__(
        self, trainer: Any, session: Session, average: WeightAverage | None, swapped: Callable[[], Any]
    ) -> None:
        self.trainer, self.session, self.average, self.swapped = trainer, session, average, swapped
        self.sharded = is_sharded(trainer)
        self.engine = is_deepspeed(trainer)

    def save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The weights that were evaluated are the ones that are saved."""
        with self.swapped():
            return original(*args, **kwargs)

    def save_checkpoint(self, original: Callable[..., Any], model: Any, trial: Any) -> None:
        """Write the host's checkpoint and the run's state; whole or absent, unless the user's own code writes it."""
        trainer = self.trainer
        state, main = trainer.state, trainer.args.should_save
        run = Path(trainer._get_output_dir(trial=trial))
        final = run / f"checkpoint-{state.global_step}"
        if not of_host(original):
            self._beside_the_users(original, final, model, trial)
            return
        pushed: list[Any] = []
        with checkpoint_folders.unfinished(final, main, trainer.accelerator.wait_for_everyone) as temporary:
            scoped = Held(trainer)
            scoped.value("_get_output_dir", lambda trial=None: str(temporary))
            scoped.value("_push_from_checkpoint", pushed.append)
            try:
                # their engines write the weights a second time, for a resume
                with self.swapped() if self.sharded or self.engine else nullcontext():
                    original(model, trial)
            finally:
                scoped.undo()
            if state.best_global_step:
                best = run / f"checkpoint-{state.best_global_step}"
                if best == final or best.is_dir():
                    state.best_model_checkpoint = str(best)
            self._write_state(temporary / final.name)
            if main:
                state.save_to_json(str(temporary / final.name / checkpoint_folders.TRAINER_STATE))
        self.session.report.checkpoints.append(final.name)
        if pushed:
            trainer._push_from_checkpoint(str(final))
        if main:
            versions.rotate(trainer, run)

    def _beside_the_users(self, original: Callable[..., Any], final: Path, model: Any, trial: Any) -> None:
        """A `_save_checkpoint` of the user's writes where and what it wants; ours is added to its folder."""
        self.session.warn("_save_checkpoint is your own: checkpoints are written in place, as it writes them")
        original(model, trial)
        if self.sharded:
            self.trainer.accelerator.wait_for_everyone()  # all of them write, or none
        if final.is_dir():
            self._write_state(final)
            self.session.report.checkpoints.append(final.name)

    def _write_state(self, folder: Path) -> None:
        """Rank 0 writes; of a sharded model all ranks gather the live weights for it."""
        average, main = self.average, self.trainer.args.should_save
        if not (main or self.sharded):
            return
        state = {
            **self._run_state().state_dict(),
            "raw": {n: t.cpu() for n, t in average.live().items()} if average is not None else {},
            "average_updates": average.updates if average is not None else 0,
            "average_wider": {n: t.cpu() for n, t in average.wider().items()} if average is not None else {},
        }
        if main:
            torch.save(state, folder / checkpoint_folders.STATE)

    def _run_state(self) -> RunState:
        """Without what the host's own files hold: the averaged weights are the model's in them."""
        held = ("config", "model", "optimizer", "scaler", "average", "random")
        # an engine's optimizer holds weights of its own, of each rank others
        return self.session.run_state().without(*held, *(("beside_model",) if self.engine else ()))

    def resume(self, checkpoint: Path) -> None:
        """The host has loaded what it saved; put back what it left out."""
        path = checkpoint / checkpoint_folders.STATE
        if not path.is_file():
            if self.average is not None:
                self.session.warn(f"{checkpoint.name} was saved without ema; the average starts from its weights")
            return
        try:
            state = self.session.files.read_plain(path)
            self._run_state().load_state_dict(state)
            raw = dict(state["raw"])
        except Exception as error:  # a stranger's file may lack anything
            raise UnsupportedRun(f"{path}: damaged ({type(error).__name__}: {str(error)[:200]})") from error
        if not raw:
            return
        if self.average is not None:
            self.average.resume(raw, state["average_updates"], state.get("average_wider", {}))
            return
        self.session.warn(f"{checkpoint.name} holds averaged weights and ema is off: its raw weights are taken")
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.session.files.copy_by_name(live, raw)
