"""The line through measured peaks, and the presets that are computed with it."""

from __future__ import annotations

import runpy

import pytest

from plugins.find_batch.forecast import Forecast, fit
from plugins.find_batch.presets import RESERVE, SIZES, STARTS, WANTED
from tests.snippets import ROOT


def test_a_line_is_found_again() -> None:
    line = fit({2: 0.9, 8: 1.2, 32: 2.4})
    assert (line.base_gib, line.sample_gib) == (pytest.approx(0.8), pytest.approx(0.05))
    assert line.peak_gib(64) == pytest.approx(4.0)
    assert line.largest(4.0, 1000) == 64
    assert line.largest(4.0, 20) == 20
    assert line.largest(0.5, 20) == 0


def test_what_is_flat_at_first_counts_from_where_it_grows() -> None:
    assert fit({2: 1.0, 4: 1.0, 16: 1.6, 32: 3.2}).sample_gib == pytest.approx(0.1)


def test_two_that_lie_close_together_are_no_line() -> None:
    assert fit({8: 0.8, 60: 6.0, 61: 5.95}).sample_gib == pytest.approx((5.95 - 0.8) / 53)


def test_a_peak_that_does_not_grow_lets_everything_in_or_nothing() -> None:
    assert Forecast(1.0, 0.0).largest(1.5, 64) == 64
    assert Forecast(2.0, 0.0).largest(1.5, 64) == 0


def test_presets_fit_by_their_own_forecast_and_the_next_power_of_two_does_not() -> None:
    for start in STARTS:
        for half in (False, True):
            for size in SIZES:
                found, line = start.micro_batch(size, half), start.forecast(half)
                assert found == 0 or line.peak_gib(found) <= size * RESERVE
                assert found == WANTED or line.peak_gib(max(2 * found, 1)) > size * RESERVE
                assert found == 0 or WANTED % found == 0


@pytest.mark.parametrize(
    ("model", "host"),
    [
        ("EasyOCR VGG-BiLSTM, 64 x 600 px", "easyocr"),
        pytest.param("YOLOv8n, 640 px", "ultralytics", marks=pytest.mark.slow),
        pytest.param("MiniLM-L6, 256 tokens", "transformers", marks=pytest.mark.slow),
    ],
)
def test_the_figures_of_a_preset_are_those_of_the_model(model: str, host: str) -> None:
    pytest.importorskip(host)
    count = runpy.run_path(str(ROOT / "benchmarks" / "presets.py"))["count"]
    (start,) = (one for one in STARTS if one.model == model)
    parameters, full, half = count(model)
    assert parameters == start.parameters
    assert (full, half) == (pytest.approx(start.full_mib, rel=0.02), pytest.approx(start.half_mib, rel=0.02))


def test_every_preset_is_counted_by_the_benchmark() -> None:
    assert set(runpy.run_path(str(ROOT / "benchmarks" / "presets.py"))["MODELS"]) == {start.model for start in STARTS}
