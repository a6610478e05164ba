"""What an update's peak memory will be, from peaks that were measured at other micro-batches.

A peak is a part that does not depend on the micro-batch (the process, weights, gradients, the optimizer's state) and a
part for each sample (activations kept for backward): `base + sample x n`. Below some micro-batch another moment of the
update is the highest, and the peak stays flat: a line through the two largest micro-batches measured is then nearer
than one through all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FLAT = 1e-6  # GiB a sample; below this a peak does not grow
ROUNDING = 1e-6  # samples
APART = 0.75  # two micro-batches nearer to each other than this differ by what one run differs from the next


@dataclass(frozen=True)
class Forecast:
    """Peak memory as a function of the micro-batch.

    Attributes:
        base_gib: what does not grow with the micro-batch.
        sample_gib: what each sample adds; 0 where nothing was seen to grow.
    """

    base_gib: float
    sample_gib: float

    def peak_gib(self, micro_batch: int) -> float:
        """The peak of an update at this micro-batch."""
        return self.base_gib + self.sample_gib * micro_batch

    def largest(self, limit_gib: float, most: int) -> int:
        """The largest micro-batch up to `most` whose peak stays within the limit; 0 where not even one sample does."""
        if self.sample_gib <= FLAT:
            return most if self.base_gib <= limit_gib else 0
        return max(0, min(most, math.floor((limit_gib - self.base_gib) / self.sample_gib + ROUNDING)))


def fit(peaks: Mapping[int, float]) -> Forecast:
    """The line through the largest micro-batch measured and the next one that lies well below it.

    Args:
        peaks: micro-batch -> peak in GiB; at least one. With one alone all of it counts as growing with the samples,
            which makes the next step a careful one.
    """
    high = max(peaks)
    below = [one for one in peaks if one <= APART * high] or [one for one in peaks if one < high]
    if not below:
        return Forecast(0.0, peaks[high] / high)
    low = max(below)
    sample = max((peaks[high] - peaks[low]) / (high - low), 0.0)
    return Forecast(peaks[high] - sample * high, sample)
