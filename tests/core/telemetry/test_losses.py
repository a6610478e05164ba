"""What a run's losses say of overfitting, and how long curves are thinned."""

from __future__ import annotations

import math
import random

import pytest

from plugins.core.telemetry.losses import LossFacts, Trend, lowest, sentence, thinned, trend

EPOCHS = range(1, 41)


def curve(function, noise: float = 0.0) -> list[tuple[float, float | None]]:  # type: ignore[no-untyped-def]
    draw = random.Random(0)
    return [(e, function(e) + draw.gauss(0, noise)) for e in EPOCHS]


def falls(e: float) -> float:
    return 3 * math.exp(-e / 10) + 0.3


def turns(e: float) -> float:
    return 3 * math.exp(-e / 6) + 0.5 + 0.02 * max(e - 18, 0)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    ("train", "valid", "expected", "words"),
    [
        (falls, falls, Trend.FALLING, "still falling"),
        (falls, turns, Trend.OVERFITTING, "It overfits"),
        (turns, turns, Trend.RISING, "no overfitting"),
        (falls, lambda e: 0.5 + 3 * math.exp(-e), Trend.LEVEL, "stands still"),
    ],
)
def test_the_trend_of_a_curve(train, valid, expected, words, noise) -> None:  # type: ignore[no-untyped-def]
    facts = LossFacts("epoch", curve(train, noise), curve(valid, noise))
    assert trend(facts) is expected
    assert words in sentence(facts)


def test_overfitting_names_the_epoch_of_the_lowest_loss() -> None:
    facts = LossFacts("epoch", curve(falls), [(e, 1 + abs(e - 12) / 12) for e in EPOCHS])
    assert "lowest at epoch 12 (1)" in sentence(facts)


def test_one_noisy_validation_decides_nothing() -> None:
    valid = curve(falls)
    valid[-1] = (40, 3.0)
    assert trend(LossFacts("epoch", curve(falls), valid)) is not Trend.OVERFITTING


def test_a_rise_next_to_nothing_gained_is_none() -> None:
    """0.001 to 0.002 is twice as much, and 0.02 % of what was gained."""
    valid = [(1.0, 5.0), (2.0, 0.001), (3.0, 0.002), (4.0, 0.002)]
    assert trend(LossFacts("update", [], valid)) is Trend.LEVEL


def test_without_a_training_loss_a_rise_is_called_overfitting() -> None:
    assert trend(LossFacts("epoch", [], curve(turns))) is Trend.OVERFITTING


@pytest.mark.parametrize("valid", [[], [(1, 2.0)], [(1, 2.0), (2, 1.0)], [(1, None), (2, None), (3, None)]])
def test_too_little_is_no_trend(valid) -> None:  # type: ignore[no-untyped-def]
    assert trend(LossFacts("epoch", [], valid)) is Trend.UNKNOWN


def test_no_loss_no_words_and_training_alone_says_so() -> None:
    assert sentence(LossFacts()) == ""
    assert "No validation loss" in sentence(LossFacts("update", [(1, 2.0)]))


def test_what_is_not_finite_is_left_out() -> None:
    assert lowest([(1, None), (2, 3.0), (3, 1e300), (math.inf, 1.0)]) == (2, 3.0)


def test_thinned_ends_where_the_run_did_and_keeps_the_mean() -> None:
    points = [(float(n), float(n)) for n in range(1001)]
    short = thinned(points, 100)
    assert len(short) <= 100
    assert short[-1][0] == 1000
    assert short[0] == (10.0, 5.0)
    assert thinned(points[:100], 100) == points[:100]
    assert thinned([], 100) == []
    assert thinned([(1, None), (2, None)], 1) == [(2, None)]
