"""Batches of like width, in an order that is a pure function of (seed, epoch), so that a run can resume anywhere.

An epoch draws every line once (with several data sets: each its share, going on through its own endless shuffle).
Lines are put into width buckets and dealt as `integrations.shared.bucketing` says, so that an epoch has one partial
batch at most and the number of shapes stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from integrations.shared.bucketing import deal, edge_for


@dataclass(frozen=True)
class Batch:
    """Positions in the joined data sets, the epoch they are drawn in, and the width in px they are padded to."""

    indices: tuple[int, ...]
    width: int
    epoch: int


class WidthBatches:
    """Endless batches. `widths[i]`: scaled width in px of line i; lines of data set k are a contiguous run.

    Args:
        sizes: lines of each data set. shares: each data set's part of an epoch (they add up to 1).
        usage: part of each data set in use (`total_data_usage_ratio`), 0..1.
        edges: bucket edges in px, ascending; the last holds the widest line. One edge: no buckets.
    """

    def __init__(
        self,
        widths: Sequence[int],
        edges: Sequence[int],
        batch_size: int,
        *,
        sizes: Sequence[int] | None = None,
        shares: Sequence[float] = (1.0,),
        usage: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.widths = np.asarray(widths)
        self.edges = np.asarray(sorted(edges))
        self.batch_size = batch_size
        self.sizes = list(sizes) if sizes else [len(self.widths)]
        self.used = [max(1, int(size * usage)) for size in self.sizes]
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        self.seed = seed
        self._counts: dict[int, int] = {}
        if len(self.sizes) == 1:
            self.drawn = list(self.used)
        else:
            total = sum(self.used)
            self.drawn = [max(1, round(share * total)) for share in shares]

    @property
    def lines_per_epoch(self) -> int:
        """Of all sets, each by its share."""
        return sum(self.drawn)

    def epoch(self, number: int) -> list[Batch]:
        """All batches of epoch `number`, shuffled."""
        drawn = np.concatenate([self._draw(k, number) for k in range(len(self.sizes))])
        rng = np.random.default_rng([self.seed, 1, number])
        rng.shuffle(drawn)
        bucket = np.searchsorted(self.edges, np.minimum(self.widths[drawn], self.edges[-1]))
        buckets = (drawn[bucket == k].tolist() for k in range(len(self.edges)))
        dealt, left = deal(buckets, self.batch_size)
        batches = [Batch(tuple(lines), int(self.edges[k]), number) for k, lines in dealt]
        if left:
            # Lines of the last bucket, as a rule; where an epoch drew none of those, the edge that holds them.
            edge = edge_for(int(self.widths[left].max()), self.edges.tolist())
            batches.append(Batch(tuple(left), edge, number))
        order = rng.permutation(len(batches))
        return [batches[i] for i in order]

    def from_position(self, position: int) -> Iterator[Batch]:
        """Batches from the `position`-th on, counted over all epochs, without end."""
        number, position = self.locate(position)
        while True:
            yield from self.epoch(number)[position:]
            number, position = number + 1, 0

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, batch within it) of a position counted over all epochs."""
        number = 0
        while position >= (count := self._batches_in(number)):
            position, number = position - count, number + 1
        return number, position

    def _batches_in(self, number: int) -> int:
        # One data set: every epoch draws the same lines, hence as many batches.
        number = 0 if len(self.sizes) == 1 else number
        if number not in self._counts:
            self._counts[number] = len(self.epoch(number))
        return self._counts[number]

    def padding_fraction(self, number: int = 0) -> float:
        """Padded part of all pixels in an epoch, 0..1."""
        batches = self.epoch(number)
        real = sum(int(np.minimum(self.widths[list(batch.indices)], batch.width).sum()) for batch in batches)
        return 1 - real / sum(batch.width * len(batch.indices) for batch in batches)

    def _draw(self, k: int, number: int) -> np.ndarray:
        """The lines of data set k in epoch `number`: the next `drawn[k]` of its endless shuffle."""
        used, count = self.used[k], self.drawn[k]
        start = number * count
        first, last = start // used, (start + count - 1) // used
        shuffles = [np.random.default_rng([self.seed, 2, k, p]).permutation(used) for p in range(first, last + 1)]
        at = start - first * used
        return np.concatenate(shuffles)[at : at + count] + self.starts[k]
