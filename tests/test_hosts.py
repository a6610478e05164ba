"""The same runs for every host and the plain loop, as a table: what each comes to must not depend on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import RUNS, killed

MICRO_BATCHES = 9
# options, a micro-batch whose gradient is not finite, and then: updates, partial windows, skipped updates.
TABLE: dict[str, tuple[dict[str, Any], int | None, tuple[int, int, int]]] = {
    "accumulate": ({"accumulate": 3}, None, (3, 0, 0)),
    "tail": ({"accumulate": 2}, None, (5, 1, 0)),
    "skipped update": ({"accumulate": 3}, 4, (2, 0, 1)),
    "compile": ({"accumulate": 3, "compile": "on", "compile_backend": "eager"}, None, (3, 0, 0)),
}
OTHERS = {
    "easyocr": {"tail": (4, 0, 0)},  # it trains a number of updates, and draws for all of them
    "lightning": {"tail": (6, 3, 0)},  # an epoch's end closes a window
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("host", RUNS)
@pytest.mark.parametrize("case", TABLE)
def test_a_run_comes_to_the_same_with_every_host(case: str, host: str, tmp_path: Path) -> None:
    options, nan, expected = TABLE[case]
    ran = RUNS[host](tmp_path / host, MICRO_BATCHES, nan=nan, **options)
    updates, partial, skipped = OTHERS.get(host, {}).get(case, expected)
    assert ran.window["accumulate"] == options["accumulate"]
    assert (ran.window["updates"], ran.window["partial_windows"], ran.window["skipped_updates"]) == (
        updates, partial, skipped,
    )  # fmt: skip
    assert ran.window["micro_batches"] == options["accumulate"] * (updates + skipped) - partial
    assert ran.window["exact"] is True
    assert (ran.report["compile"]["decision"] == "eager") == ("compile" not in options)
    assert all(bool(value.isfinite().all()) for value in ran.weights.values())


@pytest.mark.parametrize("host", RUNS)
def test_checkpointing_changes_no_weight_with_any_host(host: str, tmp_path: Path) -> None:
    plain = RUNS[host](tmp_path / "plain", MICRO_BATCHES, accumulate=3)
    ran = RUNS[host](tmp_path / "run", MICRO_BATCHES, accumulate=3, checkpointing="on")
    assert plain.report["memory"]["checkpointing"] == "off"
    assert ran.report["memory"]["checkpointing"].startswith("on: ")
    assert plain.weights.keys() == ran.weights.keys()
    for name, value in plain.weights.items():
        assert torch.equal(value, ran.weights[name]), name


@pytest.mark.parametrize("host", RUNS)
def test_a_run_that_was_killed_and_resumed_equals_the_straight_one(host: str, tmp_path: Path) -> None:
    straight = RUNS[host](tmp_path / "straight", MICRO_BATCHES, accumulate=2)
    with killed():
        RUNS[host](tmp_path / "run", MICRO_BATCHES, stop=2, accumulate=2)
    resumed = RUNS[host](tmp_path / "again", MICRO_BATCHES, resume=tmp_path / "run", accumulate=2)
    assert straight.weights.keys() == resumed.weights.keys()
    for name, value in straight.weights.items():
        assert torch.equal(value, resumed.weights[name]), name
    assert {n: v for n, v in resumed.window.items() if n != "dropped_micro_batches"} == {
        n: v for n, v in straight.window.items() if n != "dropped_micro_batches"
    }
