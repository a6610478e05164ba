"""Bucket edges, and the deal of samples to batches that both the choice of edges and the samplers follow.

A bucket is a set of samples that are padded to one length, its edge. Lengths and edges are in px or tokens.

The deal: buckets are filled from the shortest to the longest; what does not fill a whole batch is promoted to the
next bucket. So an epoch has as many batches as without buckets, at most one of them is short, and the number of
batches at each edge is known from the lengths alone.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeVar

MAX_CANDIDATES = 256

Sample = TypeVar("Sample")


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not below `length`; at least one."""
    return max(multiple, -(-int(length) // multiple) * multiple)


def edge_for(length: int, edges: Iterable[int]) -> int:
    """The smallest edge that holds `length`; the largest where none does."""
    ordered = sorted(edges)
    return ordered[min(bisect_left(ordered, length), len(ordered) - 1)]


def deal(buckets: Iterable[Sequence[Sample]], group: int) -> tuple[list[tuple[int, list[Sample]]], list[Sample]]:
    """Deal the samples of every bucket to whole batches.

    Args:
        buckets: samples by bucket, from the shortest to the longest; drawn one bucket after the other.
        group: samples of one batch, over all ranks.

    Returns:
        (bucket, batch) of every whole batch, and the samples that are left. What waited from shorter buckets goes
        first, so that nothing is promoted twice where it can be helped.
    """
    dealt: list[tuple[int, list[Sample]]] = []
    waiting: list[Sample] = []
    for bucket, members in enumerate(buckets):
        members = [*waiting, *members]
        full = len(members) // group * group
        dealt += [(bucket, members[at : at + group]) for at in range(0, full, group)]
        waiting = members[full:]
    return dealt, waiting


def choose_edges(
    lengths: Iterable[int], most: int = 8, multiple: int = 1, *, group: int = 1, room: int = sys.maxsize
) -> list[int]:
    """Edges that bound both shapes and padding, for these lengths.

    Args:
        lengths: of every sample.
        most: the most edges.
        multiple: edges are multiples of it.
        group: samples of one batch, over all ranks.
        room: the longest input that the model takes; where the longest sample rounds to more, its own length is last.

    Returns:
        At most `most` edges, rising, the fewest that pad least; the last one holds the longest sample.

    Exact: dynamic programming over the distinct rounded lengths e_1 < … < e_n, thinned to 256 quantiles first. With
    C(e) samples of at most e, the deal above puts floor(C(e) / group) batches at or below e, so following edge d by
    edge e costs e * group * (floor(C(e) / group) - floor(C(d) / group)), and the costs add up. O(most * n^2).
    """
    lengths = list(lengths)
    rounded = sorted(round_up(length, multiple) for length in lengths)
    if not rounded:
        return []
    values = sorted(set(rounded))
    if len(values) > MAX_CANDIDATES:
        last = MAX_CANDIDATES - 1
        values = sorted({rounded[i * (len(rounded) - 1) // last] for i in range(MAX_CANDIDATES)})
    n = len(values)
    filled = [bisect_right(rounded, value) // group * group for value in values]
    filled[-1] = len(rounded)
    best = [value * done for value, done in zip(values, filled, strict=True)]  # up to value j, which is an edge
    cuts: list[list[int]] = []
    for _ in range(1, min(most, n)):
        step, cut = list(best), [-1] * n
        for j in range(n):
            for i in range(j):
                cost = best[i] + values[j] * (filled[j] - filled[i])
                if cost < step[j]:
                    step[j], cut[j] = cost, i
        cuts.append(cut)
        best = step
    edges, j = [values[-1] if values[-1] <= room else int(max(lengths))], n - 1
    for cut in reversed(cuts):
        if cut[j] >= 0:
            j = cut[j]
            edges.append(values[j])
    return sorted(edges)
