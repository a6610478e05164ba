"""Exponential moving average of a model's weights, moved once an update and only by updates that happened.

Parameters are averaged, tied parameters once. Floating and complex buffers are averaged (BatchNorm's running
statistics then belong to the averaged weights); integer buffers are copied, and so are those with infinite values when
they are first seen (masks of attention, ranges that are still empty). Of tensors that are sharded over ranks each rank
averages its own shards.

A model may put another tensor in a buffer's place (`self.mean = 0.9 * self.mean + ...`), of another size too, or get a
new layer: that is the one from then on.
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
        self._model = model
        self._live: dict[str, Tensor] = {}
        self._shadow: dict[str, Tensor] = {}
        self._copied: set[str] = set()  # not averaged
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []  # where the model holds what, as it was then
        self._follow()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the live weights, once per update that happened."""
        self.updates += 1
        if self._moved:
            self._follow()
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.ramp else self.decay
        moved = {name: tensor for name, tensor in self._live.items() if name not in self._copied}
        averaged = {name: shard(tensor.detach()).to(self._shadow[name].dtype) for name, tensor in moved.items()}
        torch._foreach_lerp_([shard(self._shadow[name]) for name in averaged], list(averaged.values()), 1 - decay)
        for name in self._copied:
            self._shadow[name].copy_(self._live[name])

    @property
    def _moved(self) -> bool:
        """Whether the model holds other tensors than it did, or of another size."""
        return any(self._shadow[name].shape != tensor.shape for name, tensor in self._live.items()) or any(
            len(now) != len(then) or (then and any(now.get(key) is not value for key, value in then.items()))
            for now, then in self._places
        )

    @torch.no_grad()
    def _follow(self) -> None:
        """The tensors that the model has now, if it does not hold the average."""
        if self._inside:
            return
        reshard(self._model)
        self._live = _tensors(self._model)
        kept = self._shadow
        self._shadow = {n: kept[n] if n in kept and _fits(kept[n], t) else _copy(t) for n, t in self._live.items()}
        self._copied &= self._live.keys()
        new = {name: tensor for name, tensor in self._live.items() if self._shadow[name] is not kept.get(name)}
        self._copied |= {name for name, tensor in new.items() if not _averages(tensor)}
        held = (held for m in self._model.modules() for held in (m._parameters, m._buffers, m._modules))
        # Those of TorchScript are no dicts, and stay.
        self._places = [(of, dict(of)) for of in held if isinstance(of, dict)]

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
        self._follow()
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
        self._follow()
        for name, tensor in self._live.items():
            tensor.copy_(self._shadow[name])

    @torch.no_grad()
    def reseed(self) -> None:
        """Start the shadow again from the live weights (after they were loaded)."""
        self._follow()
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
        self._follow()  # the model's own tensors were loaded before, and may have another size since
        copy_by_name(self._shadow, state["shadow"])


def _averages(tensor: Tensor) -> bool:
    """The mean of infinities is no number."""
    if isinstance(tensor, nn.Parameter):
        return tensor.is_floating_point() or tensor.is_complex()
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(torch.isfinite(tensor).all())


def _fits(shadow: Tensor, tensor: Tensor) -> bool:
    return shadow.shape == tensor.shape and shadow.device == tensor.device and shadow.dtype == _wide(tensor.dtype)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(_wide(tensor.dtype), copy=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied one under its first name only.

    A buffer that is one value spread over a shape (`expand`) is a constant, and cannot be written to. Compressed
    sparse ones (adjacency matrices) have no strides, and stay the model's own.
    """
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            continue
        spread = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        if id(tensor) not in seen and not spread:
            seen.add(id(tensor))
            found[own_name(name)] = tensor
    return found
