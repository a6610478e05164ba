"""Bucket edges in tokens: what the model has positions for, and what buckets cost.

The choice of edges and the deal of samples to batches are those of all hosts, see `integrations.shared.bucketing`.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence

from integrations.shared.bucketing import choose_edges, round_up

MULTIPLE = 8
"""Found edges are multiples of this many tokens, which tensor cores prefer and which bounds the search."""


def fitted(length: int, room: int) -> int:
    """`length` rounded up, where the model has positions for that; else the length itself."""
    rounded = round_up(length, MULTIPLE)
    return rounded if rounded <= room else length


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """Index of the smallest edge that holds `length`; raises ValueError where none does."""
    index = bisect.bisect_left(edges, length)
    if index == len(edges):
        raise ValueError(
            f"buckets={list(edges)}: a sample has {length} tokens, allowed are edges that hold every sample"
        )
    return index


def with_overflow(edges: Sequence[int], longest: int, room: int = sys.maxsize) -> list[int]:
    """`edges`, plus one more where the longest sample does not fit into the last one."""
    edges = sorted(set(edges))
    return edges if edges and longest <= edges[-1] else [*edges, fitted(longest, room)]


def find_edges(lengths: Sequence[int], group: int, limit: int = 8, room: int = sys.maxsize) -> list[int]:
    """Edges that cost the fewest padded tokens.

    Args:
        lengths: tokens of every sample.
        group: samples of one step, over all ranks.
        limit: the most edges.
        room: tokens that the model has positions for.

    Returns:
        At most `limit` edges, rising; the last one holds the longest sample.
    """
    return choose_edges(lengths, limit, MULTIPLE, group=group, room=room)


def padded_tokens(lengths: Sequence[int], edges: Sequence[int], group: int) -> int:
    """Tokens an epoch costs when `lengths` are dealt to buckets, padding included."""
    total, waiting = 0, 0
    counts = [0] * len(edges)
    for length in lengths:
        counts[bucket_of(length, edges)] += 1
    for edge, count in zip(edges, counts, strict=True):
        here = waiting + count
        waiting = here % group
        total += edge * (here - waiting)
    return total + (edges[max(i for i, count in enumerate(counts) if count)] * waiting if waiting else 0)


def expected_tokens(lengths: Sequence[int], size: int) -> float:
    """Tokens that an epoch of shuffled batches of `size` costs when each is padded to its longest sample.

    With the lengths in order, the k-th smallest of n is the longest of a draw with probability
    (k/n)^size - ((k-1)/n)^size (draws with replacement).
    """
    n = len(lengths)
    return n * sum(x * ((k / n) ** size - ((k - 1) / n) ** size) for k, x in enumerate(sorted(lengths), start=1))
