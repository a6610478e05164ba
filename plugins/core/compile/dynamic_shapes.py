"""Bounded shapes: marking the dimension that varies, and choosing edges to pad to.

A mark is an attribute of the tensor object that a device copy loses, so it is put on after the transfer and
outside the compiled region. Three ways, each tried when the one before it failed: a strict mark (one graph for all
sizes; raises where the compiler specialised it), a maybe-mark (no guarantee, never raises), and none (one static
graph a size).
"""

from __future__ import annotations

from collections import Counter
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


def edge_for(length: int, edges: Iterable[int]) -> int:
    """The smallest edge that holds `length` (px or tokens); the largest where none does."""
    ordered = sorted(edges)
    return next((edge for edge in ordered if edge >= length), ordered[-1])


def choose_edges(lengths: Iterable[int], most: int = 8, multiple: int = 1) -> list[int]:
    """Edges that bound both shapes (at most `most`) and padding, for these lengths (px or tokens).

    Exact: dynamic programming over the distinct (rounded) lengths, minimising the total padding; O(most * n^2) for n
    distinct lengths, which are thinned to 256 quantiles first.
    """
    rounded = sorted(-(-int(n) // multiple) * multiple for n in lengths)
    if not rounded:
        return []
    count = Counter(rounded)
    values = sorted(count)
    if len(values) > 256:
        keep = {rounded[i * (len(rounded) - 1) // 255] for i in range(256)} | {rounded[-1]}
        merged: Counter[int] = Counter()
        for value in values:
            merged[edge_for(value, keep)] += count[value]
        count, values = merged, sorted(merged)
    n = len(values)
    # cost[i][j]: padding when lengths values[i..j] all pad to values[j]; through running sums.
    items, mass = [0], [0]
    for value in values:
        items.append(items[-1] + count[value])
        mass.append(mass[-1] + count[value] * value)

    def cost(i: int, j: int) -> int:
        return values[j] * (items[j + 1] - items[i]) - (mass[j + 1] - mass[i])

    best = [cost(0, j) for j in range(n)]
    cuts: list[list[int]] = []
    for _ in range(1, min(most, n)):
        step, cut = list(best), [-1] * n
        for j in range(n):
            for i in range(1, j + 1):
                padded = best[i - 1] + cost(i, j)
                if padded < step[j]:
                    step[j], cut[j] = padded, i
        cuts.append(cut)
        best = step
    edges, j = [values[-1]], n - 1
    for cut in reversed(cuts):
        if cut[j] > 0:
            j = cut[j] - 1
            edges.append(values[j])
    return sorted(edges)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
