"""The largest micro-batch that fits, in few measurements.

Two small micro-batches give a line (see `forecast`), the line a place near the limit; the answer is always one that
was itself measured to fit. A measurement is a training in a process of its own, so the search is written to need few of
them: three or four where memory grows along a line, and never more than `MOST_RUNS`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from plugins.find_batch.forecast import Forecast, fit

MOST_RUNS = 8
MARGIN = 0.03  # of what the limit leaves above the smallest peak: one run differs from the next
CLOSE = 0.04  # of the micro-batch: more than this may still be gained, or the search ends
SURE = 0.08  # of the limit: a forecast so much above it needs no measurement
FIRST, SECOND = 2, 4  # the first micro-batch measured (BatchNorm cannot train on one sample), and its multiple
CLEAR = 0.05  # of the limit: growth below this may be noise, and is no reason to go far; after n measurements
CAREFUL = 3  # to the power of n, times the largest micro-batch that fits
NEAR = 3  # times what fits: a line reaches so far, and only a little less has to be tried than what went over


class Outcome(Enum):
    """What became of one measurement."""

    DONE = "ran to its end"
    OVER = "went over the limit"
    SHORT = "the data have too few samples for such a micro-batch"


@dataclass(frozen=True)
class Measurement:
    """One short training.

    Attributes:
        micro_batch: samples a micro-batch.
        outcome: a training that was stopped at the limit is `OVER`.
        peak_gib: the highest memory of its updates; None where it did not come to an end.
        sample_seconds: of an update, by its samples; None where no steady one was timed.
    """

    micro_batch: int
    outcome: Outcome
    peak_gib: float | None = None
    sample_seconds: float | None = None

    def fits(self, limit_gib: float) -> bool:
        """Whether it ran to its end within the limit."""
        return self.outcome is Outcome.DONE and self.peak_gib is not None and self.peak_gib <= limit_gib


Measure = Callable[[int], Measurement]


@dataclass
class Search:
    """A search, and after `run` what it found.

    Attributes:
        candidates: micro-batches to choose from, ascending.
        limit_gib: what the training may take.
        exact: the answer is the largest candidate that fits; else one within `CLOSE` of it, in fewer runs.
        measured: every measurement, in its order.
    """

    candidates: Sequence[int]
    limit_gib: float
    exact: bool = True
    measured: list[Measurement] = field(default_factory=list)

    @property
    def usable_gib(self) -> float:
        """The limit without the margin."""
        least = min((one.peak_gib for one in self.measured if one.peak_gib is not None), default=0.0)
        return self.limit_gib - MARGIN * max(self.limit_gib - least, 0.0)

    @property
    def best(self) -> Measurement | None:
        """The largest micro-batch that was measured to fit."""
        fitting = [one for one in self.measured if one.fits(self.usable_gib)]
        return max(fitting, key=lambda one: one.micro_batch, default=None)

    @property
    def forecast(self) -> Forecast | None:
        """The line through what was measured; None where nothing came to an end."""
        peaks = {one.micro_batch: one.peak_gib for one in self.measured if one.peak_gib is not None}
        return fit(peaks) if peaks else None

    @property
    def settled(self) -> bool:
        """Whether nothing larger is worth a measurement; False where the runs were used up before."""
        return self._next() is None

    def run(self, measure: Measure, runs: int = MOST_RUNS) -> Measurement | None:
        """Measure until it is settled, at most `runs` times.

        Returns:
            The largest micro-batch that fits; None where the smallest candidate does not.
        """
        while len(self.measured) < runs and (at := self._next()) is not None:
            self.measured.append(measure(self.candidates[at]))
        return self.best

    def _next(self) -> int | None:
        """Index of the next candidate to measure; None where there is nothing to be learnt."""
        low, high = self._bracket()
        if high - low <= 1:
            return None
        if not self.measured:
            return min(bisect_left(self.candidates, FIRST), high - 1)
        if low < 0:
            return (high - 1) // 2 if high > 2 else 0
        largest = self.candidates[low]
        over = self.candidates[high] if high < len(self.candidates) else None
        if not self.exact and over is not None:
            high = bisect_right(self.candidates, over * (1 - CLOSE))
        nearest = low + 1 if self.exact else bisect_right(self.candidates, largest * (1 + CLOSE))
        if nearest >= high:
            return None
        line = self.forecast
        if line is None or sum(one.peak_gib is not None for one in self.measured) < 2:
            return self._at(largest * SECOND, nearest, high)
        aimed = line.largest(self.usable_gib, self.candidates[-1])
        if line.sample_gib * largest < CLEAR * self.limit_gib:
            aimed = min(aimed, largest * CAREFUL ** len(self.measured))
        if aimed < self.candidates[nearest]:
            sure = line.peak_gib(self.candidates[nearest]) > self.limit_gib * (1 + SURE)
            return None if sure or not self.exact else nearest
        if aimed >= self.candidates[high - 1] and over is not None:  # the line was too hopeful
            aimed = self._below(over, largest)
        return self._at(aimed, nearest, high)

    def _below(self, over: int, largest: int) -> int:
        """Between what went over and what fits: the nearer to the former, the more the line is trusted."""
        fits = [one.fits(self.usable_gib) for one in reversed(self.measured)]
        if fits.index(True) > 1:  # the line has failed more than once
            return math.isqrt(over * largest)
        return math.floor(over * (1 - 2 * CLOSE) if over <= NEAR * largest else largest ** (1 / 3) * over ** (2 / 3))

    def _bracket(self) -> tuple[int, int]:
        """Indices of the largest candidate that fits (-1: none yet) and of the smallest above it that does not."""
        best = self.best
        low = bisect_left(self.candidates, best.micro_batch) if best else -1
        over = [one.micro_batch for one in self.measured if not one.fits(self.usable_gib)]
        high = min((bisect_left(self.candidates, one) for one in over), default=len(self.candidates))
        return low, max(high, low + 1)

    def _at(self, aimed: int, nearest: int, high: int) -> int:
        """Index of the largest candidate up to `aimed`, kept within `nearest` and `high` (not included)."""
        return max(nearest, min(bisect_right(self.candidates, aimed) - 1, high - 1))


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    below = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*below, *(number // one for one in below)})
