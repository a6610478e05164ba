"""The host's own average of the weights: who moves it, and how fast it follows."""

from __future__ import annotations

import math
from typing import Any

from integrations.contract import Session


class HostAverage:
    """The host's own ModelEMA, moved by the session once an update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def updates(self) -> int:
        """How often the host's average has moved; 0 without one."""
        return int(getattr(self.trainer.ema, "updates", 0))

    def update(self) -> None:
        """Move the host's average towards the model's weights."""
        if self.trainer.ema:  # as the host asks: a callback may have taken it away
            self.trainer.ema.update(self.trainer.model)

    def state_dict(self) -> dict[str, Any]:
        """The count of updates, and the averaged tensors by name; no tensors where the host has no average."""
        shadow = dict(self.trainer.ema.ema.state_dict()) if self.trainer.ema else {}
        return {"updates": self.updates, "shadow": shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, where the host has an average and the state holds one."""
        if not (self.trainer.ema and state["shadow"]):
            return
        self.trainer.ema.ema.load_state_dict(state["shadow"])
        self.trainer.ema.updates = state["updates"]


def set_decay(trainer: Any, session: Session, decay: float | str) -> None:
    """The host's ramp with another ceiling; `off` keeps the average equal to the live weights."""
    if trainer.ema is None:  # an older host has it on rank 0 only
        return
    if decay == "off":
        trainer.ema.decay = lambda updates: 0.0
    elif decay != "host":
        trainer.ema.decay = lambda updates: float(decay) * (1 - math.exp(-updates / 2000))
    session.report.ema.decay = 0.9999 if decay == "host" else decay
