"""A run's numbers, one entry per update: what the pictures of its report are drawn from."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Series:
    """Numbers per update, and the updates at which graphs were compiled or the plan was switched.

    Units: s of its micro-batches and of waiting for their data; L2 norm; GiB in use after it; fraction of padding.
    """

    seconds: array[float] = field(default_factory=lambda: array("d"))
    waits: array[float] = field(default_factory=lambda: array("d"))
    norms: array[float] = field(default_factory=lambda: array("d"))
    memory: array[float] = field(default_factory=lambda: array("d"))
    padding: array[float] = field(default_factory=lambda: array("d"))
    clipped: int = 0
    compiled_at: list[int] = field(default_factory=list)
    switched_at: list[int] = field(default_factory=list)
    samples: int = 0

    @property
    def waiting(self) -> float:
        """Seconds in all that were spent waiting for data."""
        return sum(self.waits)

    def median_seconds(self) -> float | None:
        """Median over updates, the first (warm-up, compile) excluded where there are others."""
        steady = self.seconds[1:] or self.seconds
        return median(steady) if steady else None
