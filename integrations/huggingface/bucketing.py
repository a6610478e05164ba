"""Bucket edges, and the deal of samples to batches that both the search for edges and the sampler follow.

A bucket is a set of samples that are padded to one length, its edge. Lengths and edges are in tokens.

The deal: buckets are filled from the shortest to the longest; what does not fill a whole batch is promoted to
the next bucket. So an epoch has as many batches as without buckets, at most one of them is short, and the
number of batches at each edge is known from the lengths alone.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence

MULTIPLE = 8
"""Found edges are multiples of this many tokens, which tensor cores prefer and which bounds the search."""

MAX_CANDIDATES = 256


def round_up(length: int, multiple: int = MULTIPLE) -> int:
    """The smallest multiple that is not below `length`."""
    return max(multiple, -(-length // multiple) * multiple)


def fitted(length: int, room: int) -> int:
    """`length` rounded up, where the model has positions for that; else the length itself."""
    rounded = round_up(length)
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

    Dynamic programming over the candidate edges e_1 < … < e_m. With C(e) samples of at most e tokens, the deal
    above puts floor(C(e) / group) batches at or below e, so the cost of following edge d by edge e is
    e * group * (floor(C(e) / group) - floor(C(d) / group)), and the costs add up.
    """
    if not lengths:
        return []
    candidates = _candidates(lengths)
    ordered = sorted(lengths)
    filled = [bisect.bisect_right(ordered, edge) // group * group for edge in candidates]
    filled[-1] = len(ordered)
    # best[j]: (padded tokens, edges used) of everything up to candidate j, with candidate j as an edge
    best = [(edge * done, [edge]) for edge, done in zip(candidates, filled, strict=True)]
    answer = best[-1]
    for _ in range(1, limit):
        best = [
            min(
                [
                    best[j],
                    *(
                        (best[i][0] + candidates[j] * (filled[j] - filled[i]), [*best[i][1], candidates[j]])
                        for i in range(j)
                    ),
                ],
                key=lambda plan: (plan[0], len(plan[1])),
            )
            for j in range(len(candidates))
        ]
        if best[-1][0] >= answer[0]:
            break
        answer = best[-1]
    return [*answer[1][:-1], fitted(max(lengths), room)]


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


def _candidates(lengths: Sequence[int]) -> list[int]:
    """Distinct lengths, rounded up so coarsely that at most MAX_CANDIDATES are left."""
    multiple = MULTIPLE
    while len(rounded := {round_up(length, multiple) for length in lengths}) > MAX_CANDIDATES:
        multiple *= 2
    return sorted(rounded)
