"""Exponential moving average of a model's weights, moved once an update and only by updates that happened.

Parameters are averaged, tied parameters once. Floating and complex buffers are averaged (BatchNorm's running
statistics then belong to the averaged weights); integer buffers are copied. Of tensors that are sharded over ranks each
rank averages its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plugins.core.checkpoint.module_names import own_name
from plugins.core.system.sharding import copy_by_name, reshard, shard, whole


class EMA:
    """Shadow of a model: `shadow = decay * shadow + (1 - decay) * live`, at `decay` in (0, 1).

    That of half-precision weights is kept in fp32: in bf16, which has 8 bits, a step of 1 - decay = 0.001 is rounded
    away and the average never moves.

    Args:
        model: the model to average; its tensors stay where they are.
        decay: in (0, 1).
        ramp: the n-th update has the decay (1 + n) / (10 + n) until that reaches `decay`, so that a short run is not
            ruled by its starting weights.
    """

    def __init__(self, model: nn.Module, decay: float, ramp: bool = True) -> None:
        self.decay, self.ramp, self.updates = decay, ramp, 0
        self._inside = False
        self._narrow: dict[str, Tensor] = {}  # live values of wider averages, while the model holds those
        reshard(model)
        self._model = model
        self._live = _tensors(model)
        self._shadow = {name: _copy(tensor) for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the live weights, once per update that happened."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.ramp else self.decay
        averaged = {n: shard(t.detach()).to(self._shadow[n].dtype) for n, t in self._live.items() if _averages(t)}
        torch._foreach_lerp_([shard(self._shadow[name]) for name in averaged], list(averaged.values()), 1 - decay)
        for name, tensor in self._live.items():
            if name not in averaged:
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
        """Values change places, one tensor after the other; a wider average stays, and only lends its value."""
        reshard(self._model)
        for name, tensor in self._live.items():
            shadow, now = self._shadow[name], tensor.detach().clone()
            if shadow.dtype == tensor.dtype:
                tensor.copy_(shadow)
                shadow.copy_(now)
            elif self._inside:
                tensor.copy_(self._narrow.pop(name))
            else:
                self._narrow[name] = now
                tensor.copy_(shadow)
        self._inside = not self._inside

    @torch.no_grad()
    def adopt(self) -> None:
        """Leave the averaged weights in the model for good (the end of a run)."""
        reshard(self._model)
        for name, tensor in self._live.items():
            tensor.copy_(self._shadow[name])

    @torch.no_grad()
    def reseed(self) -> None:
        """Start the shadow again from the live weights (after they were loaded)."""
        for name, tensor in self._live.items():
            self._shadow[name].copy_(tensor)

    def live(self) -> dict[str, Tensor]:
        """The live tensors by name, tied ones once: what a checkpoint of the averaged weights leaves out.

        Sharded ones are gathered: all ranks call it then.
        """
        return {name: whole(tensor.detach()) for name, tensor in self._live.items()}

    def wider(self) -> dict[str, Tensor]:
        """The averages that the model's own dtype would round, by name; gathered as in `live`."""
        return {n: whole(t.detach()) for n, t in self._shadow.items() if t.dtype != self._live[n].dtype}

    @torch.no_grad()
    def resume(self, live: Mapping[str, Tensor], updates: int, wider: Mapping[str, Tensor]) -> None:
        """The model holds the averaged weights (a checkpoint gave them): take them over, and put `live` back.

        Args:
            live: the live weights by name.
            updates: how often the average had moved.
            wider: as `wider` gave it; empty in checkpoints of 0.1.
        """
        reshard(self._model)
        self.reseed()
        copy_by_name(self._shadow, wider)
        self.updates = updates
        copy_by_name(self._live, live)

    def state_dict(self) -> dict[str, Any]:
        """Count of updates, and the averaged tensors."""
        return {"updates": self.updates, "shadow": {n: t.detach() for n, t in self._shadow.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.updates = int(state["updates"])
        copy_by_name(self._shadow, state["shadow"])


def _averages(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(tensor: Tensor) -> Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32 if half else tensor.dtype, copy=True)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied one under its first name only."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[own_name(name)] = tensor
    return found
