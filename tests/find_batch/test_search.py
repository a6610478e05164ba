"""The search over peaks that are known: monotone, flat at first, convex, noisy."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plugins.find_batch.search import MARGIN, MOST_RUNS, Measurement, Outcome, Search, divisors

ALL = range(1, 4097)


class Training:
    """Peaks by a formula; what goes over the limit is stopped there, as a process is."""

    def __init__(self, peak, limit: float, samples: int = 10**9) -> None:
        self.peak, self.limit, self.samples = peak, limit, samples
        self.asked: list[int] = []

    def __call__(self, micro_batch: int) -> Measurement:
        self.asked.append(micro_batch)
        if micro_batch > self.samples:
            return Measurement(micro_batch, Outcome.SHORT)
        peak = self.peak(micro_batch)
        if peak > self.limit:
            return Measurement(micro_batch, Outcome.OVER)
        return Measurement(micro_batch, Outcome.DONE, peak, 0.1 * micro_batch)

    def true(self, candidates) -> int:
        """The largest candidate whose peak is within the limit, by trying them all."""
        return max((n for n in candidates if n <= self.samples and self.peak(n) <= self.limit), default=0)


def linear(base: float, sample: float, flat: float = 0.0):
    return lambda n: max(base + sample * n, flat)


shapes = st.tuples(
    st.floats(0.2, 4.0),  # base
    st.floats(0.001, 0.5),  # a sample
    st.floats(0.0, 0.7),  # a floor, as a share of the limit
    st.floats(1.2, 12.0),  # the limit over the base
)


@given(shapes)
@settings(deadline=None)
def test_the_largest_micro_batch_at_all_is_within_a_tenth_of_the_true_one(shape) -> None:
    base, sample, flat, over = shape
    limit = base * over
    training = Training(linear(base, sample, flat * limit), limit)
    search = Search(ALL, limit, exact=False)
    assume(training.true(ALL) <= 300)
    best = search.run(training)
    safe = Training(training.peak, search.usable_gib).true(ALL)
    assert len(training.asked) <= MOST_RUNS
    if safe == 0:
        assert best is None
        return
    assert best is not None
    assert best.micro_batch <= training.true(ALL)
    # A peak that is flat for long may use the trials up, which the user is told.
    assert best.micro_batch >= safe / 1.1 - 1 or (flat > 0.3 and not search.settled)


@given(shapes, st.integers(1, 2000))
@settings(deadline=None)
def test_of_the_divisors_the_very_largest_that_fits_is_found(shape, effective) -> None:
    base, sample, flat, over = shape
    limit = base * over
    training = Training(linear(base, sample, flat * limit), limit)
    search = Search(divisors(effective), limit)
    best = search.run(training)
    safe = Training(training.peak, search.usable_gib).true(divisors(effective))
    assert len(training.asked) <= MOST_RUNS
    assert (best.micro_batch if best else 0) == safe
    assert best is None or effective % best.micro_batch == 0


@given(st.lists(st.floats(0.0, 0.3), min_size=64, max_size=64), st.floats(0.5, 10.0))
@settings(deadline=None)
def test_whatever_grows_the_answer_was_measured_to_fit_and_the_runs_are_bounded(steps, limit) -> None:
    peaks = [0.4 + sum(steps[:n]) for n in range(65)]
    training = Training(lambda n: peaks[n], limit)
    search = Search(range(1, 65), limit, exact=False)
    best = search.run(training)
    assert len(training.asked) == len(set(training.asked)) <= MOST_RUNS
    if peaks[1] <= limit * (1 - MARGIN):
        assert best is not None
    if best is not None:
        assert peaks[best.micro_batch] <= search.usable_gib < limit
        assert best.micro_batch in training.asked


@given(st.integers(0, 10**6), st.floats(1.6, 8.0), st.floats(0.01, 0.2))
@settings(deadline=None)
def test_peaks_that_differ_from_run_to_run_cost_no_more_than_a_tenth(seed, over, sample) -> None:
    noise, base = random.Random(seed), 0.7
    limit = base * over
    peak = linear(base, sample)
    training = Training(lambda n: peak(n) + noise.uniform(-0.01, 0.01), limit)
    search = Search(ALL, limit, exact=False)
    best = search.run(training)
    true = math.floor((limit - base) / sample)
    assert len(training.asked) <= MOST_RUNS
    if true < 2:
        return
    assert best is not None
    assert peak(best.micro_batch) <= limit
    lost = (MARGIN * limit + 0.02) / sample  # what the margin and the noise are worth in samples
    assert best.micro_batch >= (true - lost) * 0.9 - 1


def test_memory_along_a_line_takes_four_runs() -> None:
    training = Training(linear(0.6, 0.02), 2.0)
    best = Search(ALL, 2.0, exact=False).run(training)
    assert best is not None
    assert 65 <= best.micro_batch <= 68  # 70 to the limit, 68 with the margin
    assert len(training.asked) <= 4


def test_more_than_the_data_hold_is_not_asked_for_again() -> None:
    training = Training(linear(0.6, 0.001), 8.0, samples=100)
    search = Search(ALL, 8.0, exact=False)
    best = search.run(training)
    assert best is not None
    assert 90 <= best.micro_batch <= 100


def test_nothing_fits_and_the_smallest_was_tried() -> None:
    training = Training(linear(3.0, 0.1), 2.0)
    assert Search(divisors(64), 2.0).run(training) is None
    assert 1 in training.asked


@pytest.mark.parametrize(("number", "wanted"), [(1, [1]), (7, [1, 7]), (36, [1, 2, 3, 4, 6, 9, 12, 18, 36])])
def test_divisors_of_a_number(number: int, wanted: list[int]) -> None:
    assert divisors(number) == wanted
