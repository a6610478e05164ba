"""Time, sizes and norms of a run, an update each: what the report's figures and pictures are made of."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from plugins.core.step.update import Outcome
from plugins.core.telemetry.report import GradientFacts, ShapeFacts, SpeedFacts
from plugins.core.telemetry.series import Series
from plugins.core.telemetry.shapes_seen import Seen

SLOW_LOADER = 0.2  # of a step


class StepMetrics:
    """An update's time is that of its micro-batches, from arrival to the end of the step.

    What lies between them is waiting for data, unless it was validation.
    """

    def __init__(self) -> None:
        self.series = Series()
        self.seen = Seen()
        self.last_seconds = 0.0  # of the last micro-batch
        self._arrived = self._spent = self._idle_since = self._waited = 0.0
        self._elements = self._padding = 0

    def arrived(self, first: bool) -> None:
        """A micro-batch came from the loader; `first` of its window."""
        now = time.perf_counter()
        if self._idle_since:
            self._waited += now - self._idle_since
            self._idle_since = 0.0
        self._arrived = now
        if first:
            self._spent = 0.0

    def forgive(self, seconds: float) -> None:
        """Time inside this micro-batch, or before it arrived, that is neither a step's nor the loader's (a trial)."""
        if self._arrived:
            self._arrived += seconds
        elif self._idle_since:
            self._idle_since += seconds

    def idle(self) -> None:
        """The micro-batch is over."""
        self._idle_since = time.perf_counter()
        self._spend(self._idle_since)

    def not_waiting(self) -> None:
        """What passed since the last micro-batch was not waiting for data."""
        self._idle_since = 0.0

    def closed(self, outcome: Outcome, memory_gib: float) -> None:
        """An update is over, with so much memory in use."""
        self._spend(time.perf_counter())
        series = self.series
        series.seconds.append(self._spent)
        series.waits.append(self._waited)
        series.norms.append(outcome.norm)
        series.memory.append(memory_gib)
        series.padding.append(self._padding / self._elements if self._elements else 0.0)
        series.clipped += outcome.clipped
        series.samples += outcome.samples
        self._waited, self._elements, self._padding = 0.0, 0, 0

    def none_finite(self, count: int) -> bool:
        """Whether none of the last `count` updates had a finite gradient, and so many there were."""
        last = self.series.norms[-count:]
        return len(last) == count and not any(map(math.isfinite, last))

    def shape(self, shape: Iterable[int], padding: int = 0) -> None:
        """Note one input of the model.

        Args:
            shape: its sizes, one a dimension.
            padding: how many of its elements are padding.
        """
        sizes = tuple(shape)
        if not all(isinstance(size, int) for size in sizes):  # a ragged (nested) tensor's has no number
            return
        self.seen.add(sizes, padding, math.prod(sizes))
        self._elements += math.prod(sizes)
        self._padding += padding

    def sum_up(self, speed: SpeedFacts, shapes: ShapeFacts, gradients: GradientFacts) -> None:
        """Write the figures into the report's parts."""
        series = self.series
        speed.first_step_seconds = series.seconds[0] if series.seconds else None
        speed.step_seconds_median = series.median_seconds()
        if total := sum(series.seconds):
            speed.samples_per_second = series.samples / total
            speed.loader_wait_fraction = self.waiting_fraction
        shapes.seen = sorted([list(s) for s in self.seen.shapes])
        shapes.padding_fraction = self.seen.padding_fraction
        if series.norms:
            ordered = sorted(n for n in series.norms if n == n)
            gradients.norm_median = ordered[len(ordered) // 2] if ordered else None
            gradients.clipped_fraction = series.clipped / len(series.norms)

    @property
    def waiting_fraction(self) -> float:
        """The fraction of a run's time, updates and waiting together, that went into waiting for data."""
        total = sum(self.series.seconds) + self.series.waiting
        return self.series.waiting / total if total else 0.0

    def advice(self) -> str:
        """What would help more than a faster step, or empty."""
        if self.waiting_fraction <= SLOW_LOADER or len(self.series.seconds) < 10:
            return ""
        return (
            "waiting for data takes more than a fifth of the time: more loader workers, pinned memory or a cached data "
            "set would help more than a faster step"
        )

    def _spend(self, now: float) -> None:
        if self._arrived:
            self.last_seconds = now - self._arrived
            self._spent += self.last_seconds
            self._arrived = 0.0
