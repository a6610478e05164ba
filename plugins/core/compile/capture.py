"""How the modules of a model are called, without the values: what a compile in another process needs to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Like:
    """A tensor's kind, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """What there is to know of this tensor, its values apart."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), bool(tensor.requires_grad))

    def make(self) -> Tensor:
        """A tensor of zeros that is like it."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        return made.requires_grad_(self.requires_grad)


def kinds(value: Any) -> Any:
    """A call's arguments with every tensor replaced by its kind."""
    if isinstance(value, Tensor):
        return Like.of(value)
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(kinds(item) for item in value)
    return value


def made(value: Any) -> Any:
    """The opposite of `kinds`."""
    if isinstance(value, Like):
        return value.make()
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(made(item) for item in value)
    return value


@dataclass(frozen=True)
class Call:
    """One kind of call of a module: kinds of its arguments, and the autocast that it is made in."""

    module: nn.Module
    args: Any
    kwargs: Any
    autocast: tuple[str, torch.dtype] | None

    def of_batch(self, part: int) -> tuple[Call, float]:
        """The same on the first `part`th of its batch, and how many times as large the whole is.

        The batch is the first dimension of the first tensor, and of every other one of the same length.
        """
        first = next((leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Like)), None)
        if first is None or not first.shape:
            return self, 1.0
        whole = first.shape[0]
        some = max(whole // part, 1)

        def cut(leaf: Any) -> Any:
            batched = isinstance(leaf, Like) and leaf.shape[:1] == (whole,)
            return replace(leaf, shape=(some, *leaf.shape[1:])) if batched else leaf

        return replace(self, args=tree_map(cut, self.args), kwargs=tree_map(cut, self.kwargs)), whole / some


class Captured:
    """Notes how modules are called while it is entered, one entry a distinct kind of call.

    It stands where a compiled call will stand, so that what it sees is what will be compiled.

    Attributes:
        calls: one of each kind.
        times: how often each was made.
    """

    def __init__(self, modules: Sequence[nn.Module], takes: Callable[[tuple[Any, ...]], bool] = lambda args: True):
        self.modules, self.takes = modules, takes
        self.calls: list[Call] = []
        self.times: list[int] = []
        self._seen: dict[str, int] = {}

    def __enter__(self) -> Captured:
        self._there = [vars(module).get("_compiled_call_impl") for module in self.modules]
        for module in self.modules:
            module._compiled_call_impl = partial(self._note, module)
        return self

    def __exit__(self, *_: object) -> None:
        for module, there in zip(self.modules, self._there, strict=True):
            del module._compiled_call_impl
            if there is not None:
                module._compiled_call_impl = there

    def _note(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.takes(args):
            call = Call(module, kinds(args), kinds(kwargs), _autocast((*args, *kwargs.values())))
            structure = [(n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()]
            sign = repr((type(module), structure, call.args, call.kwargs, call.autocast))
            if sign not in self._seen:
                self._seen[sign] = len(self.calls)
                self.calls.append(call)
                self.times.append(0)
            self.times[self._seen[sign]] += 1
        return module._call_impl(*args, **kwargs)


def _autocast(values: tuple[Any, ...]) -> tuple[str, torch.dtype] | None:
    """The autocast in force for the device of the first tensor."""
    device = next((t.device.type for t in values if isinstance(t, Tensor)), "cpu")
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
