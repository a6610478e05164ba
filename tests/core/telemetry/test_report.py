from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugins.core.telemetry.html import _WORDS, POINTS, _thinned, render, summary
from plugins.core.telemetry.report import Report, versions
from plugins.core.telemetry.series import Series
from plugins.core.telemetry.step_metrics import StepMetrics


def report() -> Report:
    made = Report("test", {"compile": "off", "clip_norm": 0.1})
    made.window.updates, made.window.accumulate, made.window.micro_batch, made.window.effective_batch = 7, 4, 2, 8
    return made


def test_written_twice_the_later_stands(tmp_path: Path) -> None:
    made = report()
    path = made.write(tmp_path / "a" / "b")
    made.window.updates = 8
    assert made.write(tmp_path / "a" / "b") == path
    assert json.loads(path.read_text())["window"]["updates"] == 8
    assert sorted(f.name for f in path.parent.iterdir()) == ["accel_report.html", "accel_report.json"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    made = report()
    made.gradients.norm_median = float("nan")
    made.memory.steady_peak_gib = float("inf")
    made.speed.candidates = [{"plan": "eager", "step_seconds_median": float("nan")}]
    text = made.write(tmp_path).read_text()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["gradients"]["norm_median"] is None
    assert data["memory"]["steady_peak_gib"] is None
    assert data["speed"]["candidates"] == [{"plan": "eager", "step_seconds_median": None}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "7 updates of 8 samples (4 x 2), exactly the big batch."),
        ({"exact": False, "approximate_terms": ["masks", "poses"]}, "approximately the big batch. Approximate: masks,"),
        ({"skipped_updates": 3}, "3 updates skipped for a non-finite gradient."),
    ],
)
def test_the_summary_in_words(change: dict[str, object], words: str) -> None:
    made = report()
    for name, value in change.items():
        setattr(made.window, name, value)
    assert words in summary(made.data())


def test_the_summary_says_how_it_ran_and_why() -> None:
    made = report()
    made.compile.decision, made.compile.reason = "eager", "no compiler"
    made.speed.step_seconds_median = 0.25
    assert summary(made.data()).endswith("Ran eager: no compiler. 0.25 s an update.")


def test_the_page_shows_summary_warnings_and_every_section_and_escapes_them() -> None:
    made = report()
    made.warnings = ["<b>bold</b> & loud"]
    made.checkpoints = ["weights/last.pt"]
    made.compile.phases = {"train": 2, "validation": 1}
    page = render(made.data())
    assert "7 updates of 8 samples" in page
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; loud" in page
    assert "<b>bold" not in page
    assert "train: 2, validation: 1" in page
    assert "weights/last.pt" in page
    for section in ("window", "compile", "speed", "memory", "shapes", "gradients", "batchnorm", "ema", "config"):
        assert f"<h2>{section}</h2>" in page
    assert "<svg" not in page
    assert "http" not in page


def test_pictures_where_there_is_a_series() -> None:
    series = Series()
    for n in range(5):
        series.seconds.append(0.1 + n)
        series.norms.append(float(n) if n != 2 else float("nan"))
    series.compiled_at = [0, 3]
    page = render(report().data(), series)
    assert page.count("<svg") == 1
    assert "<?xml" not in page


def test_pictures_of_all_that_a_run_counted() -> None:
    series = Series()
    for n in range(2500):
        series.seconds.append(1.0 if n else 30.0)
        series.waits.append(0.25)
        series.norms.append(float(n))
        series.memory.append(2.0)
        series.padding.append(0.1)
    series.compiled_at, series.switched_at = [7], [7, 90]
    page = render(report().data(), series)
    assert len(page) < 400_000  # of a long run too
    assert page.count("<svg") == 1
    assert series.waiting == 625.0


def test_a_long_curve_is_thinned_to_means() -> None:
    updates, values = _thinned([1.0, 3.0] * POINTS)
    assert updates == list(range(0, 2 * POINTS, 2))
    assert set(values) == {2.0}
    assert _thinned([1.0, 3.0]) == ([0, 1], [1.0, 3.0])


def test_plans_that_were_tried_are_a_table() -> None:
    made = report()
    made.speed.plan, made.speed.reason = "bf16", "bf16: 0.5 s a step against 1 s"
    made.speed.candidates = [
        {"plan": "bf16", "step_seconds_median": 0.5, "spread_seconds": 0.01, "first_step_seconds": None, "loss": 2.5}
    ]
    page = render(made.data())
    assert "plans that were tried" in page
    assert page.index("<td>bf16</td><td>0.5</td>") > 0
    assert "<td>candidates</td>" not in page
    assert "Plan: bf16 (bf16: 0.5 s a step against 1 s)." in summary(made.data())
    assert "plans that were tried" not in render(report().data())


def test_the_first_step_is_not_in_the_median() -> None:
    series = Series()
    assert series.median_seconds() is None
    series.seconds.append(100.0)
    assert series.median_seconds() == 100.0
    for seconds in (1.0, 2.0, 3.0):
        series.seconds.append(seconds)
    assert series.median_seconds() == 2.0


def test_versions_of_what_is_installed() -> None:
    found = versions("torch", "no-such-distribution")
    assert {"python", "torch"} <= set(found)
    assert "no-such-distribution" not in found


def test_the_page_speaks_in_words_and_every_word_has_its_field():
    fields = {name for part in Report("loop", {}).data().values() if isinstance(part, dict) for name in part}
    assert set(_WORDS) <= fields
    page = render(Report("loop", {"clip_norm": "host"}).data())
    assert "share of the time spent waiting for data" in page
    assert "loader_wait_fraction" not in page
    assert "clip_norm" in page  # a setting keeps its name


def test_slow_data_is_said_once_however_often_the_report_is_written():
    metrics = StepMetrics()
    metrics.series.seconds.extend([1.0] * 10)
    metrics.series.waits.extend([1.0] * 10)
    first = metrics.advice()
    metrics.series.waits.extend([9.0])
    assert first == metrics.advice()
    assert first.startswith("waiting for data takes more than a fifth")
