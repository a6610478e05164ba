"""When a trainer's window closes, and who steps: the core, or a user's own `optimizer_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ultralytics.engine.trainer import BaseTrainer

from integrations.contract import Session
from integrations.patches import Patches

HOST_CLIP_NORM = 10.0


class Stepping:
    """Holds `optimizer_step`, which the host calls after every micro-batch since its `accumulate` is held at 1.

    Args:
        closes_after: how many micro-batches make up the window.
    """

    def __init__(self, trainer: Any, session: Session, patches: Patches, closes_after: Callable[[], int]) -> None:
        self.trainer, self.session, self.closes_after = trainer, session, closes_after
        self.around = patches.around(trainer, "optimizer_step", self._optimizer_step)

    def close(self) -> None:
        """Close the window now, if there is one."""
        self.around.enter(self._close)

    def _optimizer_step(self, inner: Callable[[], None]) -> None:
        if self.session.window.micro_batches >= self.closes_after():
            self._close(inner)

    def _close(self, inner: Callable[[], None]) -> None:
        """Update once. A user's own step gets the gradients of the whole window, unscaled, and does all the rest.

        The optimizer and the scaler are those that the trainer holds now: a callback may have exchanged them.
        """
        trainer, session, clip_norm = self.trainer, self.session, host_clip_norm(self.around.inner)
        if session.window.empty:
            return
        session.use(trainer.optimizer, trainer.scaler, clip_norm)
        if clip_norm is not None:
            session.close()
            return
        outcome = session.prepare_update()
        if outcome.stepped:
            scoped = Patches()
            scoped.put(trainer.scaler, "unscale_", lambda optimizer: None)  # that is done, and may be done only once
            try:
                inner()
            finally:
                scoped.undo()
        else:
            if trainer.scaler.is_enabled():
                trainer.scaler.update()
            trainer.optimizer.zero_grad()
        session.finish_update(outcome, averaged=True)


def host_clip_norm(step: Callable[[], None]) -> float | None:
    """What the host's `optimizer_step` clips at; None for a user's own, which clips as it likes."""
    return HOST_CLIP_NORM if getattr(step, "__func__", step) is BaseTrainer.optimizer_step else None
