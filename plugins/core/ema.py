"""Exponential moving average of a model's weights, moved once an update and only by updates that happened.

Parameters are averaged, tied parameters once. Floating buffers are averaged (BatchNorm's running statistics then
belong to the averaged weights); integer buffers are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Shadow of a model: `shadow = decay * shadow + (1 - decay) * live`, at `decay` in (0, 1).

    With `ramp` the n-th update has the decay (1 + n) / (10 + n) until that reaches `decay`, so that a short run
    is not ruled by its starting weights.
    """

    def __init__(self, model: nn.Module, decay: float, ramp: bool = True) -> None:
        self.decay, self.ramp, self.updates = decay, ramp, 0
        self._inside = False
        self._live = _tensors(model)
        self._shadow = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.ramp else self.decay
        pairs = [(self._shadow[n], t.detach()) for n, t in self._live.items() if t.is_floating_point()]
        torch._foreach_lerp_([s for s, _ in pairs], [t for _, t in pairs], 1 - decay)
        for name, tensor in self._live.items():
            if not tensor.is_floating_point():
                self._shadow[name].copy_(tensor)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model holds the averaged weights. Values move, storages stay, so compiled code holds."""
        with self._holding(average=True):
            yield

    @contextmanager
    def unswapped(self) -> Iterator[None]:
        """Inside, the model holds the live weights, also where it is inside `swapped` (to be saved)."""
        with self._holding(average=False):
            yield

    @contextmanager
    def _holding(self, average: bool) -> Iterator[None]:
        before = self._inside
        if before != average:
            self._swap()
        try:
            yield
        finally:
            if self._inside != before:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self._live.items():
            kept = tensor.detach().clone()
            tensor.copy_(self._shadow[name])
            self._shadow[name].copy_(kept)
        self._inside = not self._inside

    @torch.no_grad()
    def adopt(self) -> None:
        """Leave the averaged weights in the model for good (the end of a run)."""
        for name, tensor in self._live.items():
            tensor.copy_(self._shadow[name])

    @torch.no_grad()
    def reseed(self) -> None:
        """Start the shadow again from the live weights (after they were loaded)."""
        for name, tensor in self._live.items():
            self._shadow[name].copy_(tensor)

    def live(self) -> dict[str, Tensor]:
        """The live tensors by name, tied ones once: what a checkpoint of the averaged weights leaves out."""
        return {name: tensor.detach() for name, tensor in self._live.items()}

    @torch.no_grad()
    def resume(self, live: Mapping[str, Tensor], updates: int) -> None:
        """The model holds the averaged weights (a checkpoint gave them): take them over, and put `live` back."""
        self.reseed()
        self.updates = updates
        for name, tensor in live.items():
            self._live[name].copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": {n: t.detach() for n, t in self._shadow.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])
        for name, tensor in state["shadow"].items():
            self._shadow[name].copy_(tensor)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied one under its first name only."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found
