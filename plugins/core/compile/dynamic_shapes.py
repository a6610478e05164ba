"""Bounded shapes: marking the dimension that varies, and choosing edges to pad to.

A mark is an attribute of the tensor object that a device copy loses, so it is put on after the transfer and
outside the compiled region. Three ways, each tried when the one before it failed: a strict mark (one graph for all
sizes; raises where the compiler specialised it), a maybe-mark (no guarantee, never raises), and none (one static
graph a size).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

WAYS = ("strict", "maybe", "static")


class Marker:
    """Marks dimensions `dims` of every tensor among a call's arguments.

    `way` is the one in force: strict, maybe, static. Size 1 is never marked: torch always specialises it.
    """

    def __init__(self, dims: Iterable[int] = (), way: str = "strict") -> None:
        self.dims = tuple(dims)
        self.way = way if self.dims else "static"

    def mark(self, *arguments: Any, **named: Any) -> None:
        """Mark the dimensions that vary in every tensor of a call that has them."""
        if self.way == "static":
            return
        mark = torch._dynamo.mark_dynamic if self.way == "strict" else torch._dynamo.maybe_mark_dynamic
        for tensor in _tensors((*arguments, *named.values())):
            for dim in self.dims:
                if dim < tensor.dim() and tensor.shape[dim] > 1:
                    mark(tensor, dim)

    @staticmethod
    def clear(*arguments: Any, **named: Any) -> None:
        """Take marks off again, so that the next way starts clean."""
        for tensor in _tensors((*arguments, *named.values())):
            for name in [n for n in vars(tensor) if "_dynamo_" in n]:
                delattr(tensor, name)

    def relax(self) -> bool:
        """Fall to the next way; False where there is none left."""
        at = WAYS.index(self.way)
        if at + 1 >= len(WAYS):
            return False
        self.way = WAYS[at + 1]
        return True


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
