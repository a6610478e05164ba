from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from plugins.core.telemetry.losses import KEPT
from plugins.core.telemetry.report import LARGEST, Report, versions
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


OF_0_1 = """{"schema": 1, "host": "loop", "versions": {"torch": "2.8.0"}, "device": "cpu",
 "config": {"compile": "auto"}, "warnings": [],
 "window": {"accumulate": 4, "updates": 7, "exact": true, "approximate_terms": []},
 "compile": {"decision": "eager", "reason": "no compiler"}, "speed": {"plan": "host", "step_seconds_median": 0.25},
 "memory": {"kind": "rss", "first_step_peak_gib": 1.0, "steady_peak_gib": 1.0}, "checkpoints": []}"""


def read(text: str | bytes) -> Report:
    return TypeAdapter(Report).validate_json(text)


def test_a_report_of_0_1_without_the_later_keys_is_read() -> None:
    old = read(OF_0_1)
    assert (old.schema, old.window.updates, old.speed.step_seconds_median) == (1, 7, 0.25)
    assert (old.losses.train, old.losses.valid, old.memory.limit_gib, old.parameters) == ([], [], None, 0)


def test_a_report_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    made = report()
    made.losses.train = [(1, 2.0), (2, float("nan"))]
    made.losses.valid = [(2, 1.5)]
    found = read(made.write(tmp_path).read_bytes())
    assert found.losses.train == [(1, 2.0), (2, None)]
    assert found.data() == made.data()


def test_curves_of_losses_are_thinned_in_the_report_and_kept_in_the_run() -> None:
    made = report()
    made.losses.train = [(n, float(n)) for n in range(10 * KEPT)]
    assert len(made.data()["losses"]["train"]) == KEPT
    assert len(made.losses.train) == 10 * KEPT


def test_an_integer_of_any_size_is_one_that_can_be_drawn() -> None:
    made = report()
    made.window.updates = 10**400
    assert made.data()["window"]["updates"] == LARGEST


def test_a_name_that_is_no_unicode_is_written_by_its_code(tmp_path: Path) -> None:
    made = report()
    made.warnings = ["no labels: b\udcffd.png"]
    page = made.write(tmp_path).with_name("accel_report.html").read_text(encoding="utf-8")
    assert r"no labels: b\udcffd.png" in page
    assert read((tmp_path / "accel_report.json").read_bytes()).warnings == [r"no labels: b\udcffd.png"]


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


def test_slow_data_is_said_once_however_often_the_report_is_written():
    metrics = StepMetrics()
    metrics.series.seconds.extend([1.0] * 10)
    metrics.series.waits.extend([1.0] * 10)
    first = metrics.advice()
    metrics.series.waits.extend([9.0])
    assert first == metrics.advice()
    assert first.startswith("waiting for data takes more than a fifth")
