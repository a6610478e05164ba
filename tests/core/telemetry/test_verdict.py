"""The sentences of a run: how fast, how exact, what was skipped, what to do next."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.core.telemetry.report import Report
from plugins.core.telemetry.verdict import Mark, faster, verdict


def report() -> Report:
    made = Report("test", {"compile": "off"})
    made.window.updates, made.window.accumulate, made.window.micro_batch, made.window.effective_batch = 7, 4, 2, 8
    return made


def tried(*plans: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"plan": plan, "step_seconds_median": seconds} for plan, seconds in plans]


def words(made: Report) -> str:
    return " ".join(found.words for found in verdict(made.data()).findings)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "7 updates of 8 samples (4 x 2), exactly the big batch."),
        ({"exact": False, "approximate_terms": ["masks", "poses"]}, "approximately the big batch. Approximate: masks,"),
        ({"skipped_updates": 3}, "3 updates skipped for a non-finite gradient."),
        ({"dropped_micro_batches": 2}, "2 micro-batches dropped"),
    ],
)
def test_how_exact_and_what_was_skipped(change: dict[str, object], expected: str) -> None:
    made = report()
    for name, value in change.items():
        setattr(made.window, name, value)
    assert expected in words(made)


def test_how_it_ran_and_why() -> None:
    made = report()
    made.compile.decision, made.compile.reason = "eager", "no compiler"
    made.speed.step_seconds_median = 0.25
    assert "An update took 0.25 s." in words(made)
    assert "Ran eager: no compiler." in words(made)


@pytest.mark.parametrize(
    ("plan", "candidates", "expected"),
    [
        ("bf16", tried(("host", 1.0), ("bf16", 0.5)), 2.0),
        ("host", tried(("host", 1.0), ("bf16", 1.5)), 1.0),
        # timed anew: the compile gained 20 % of 0.5, whatever the machine did meanwhile
        ("bf16 + c", tried(("host", 1.0), ("bf16", 0.5), ("bf16", 1.0), ("bf16 + c", 0.8)), 2.5),
        ("bf16", tried(("host", 1.0)), None),
        ("remembered", tried(("host", 1.0), ("bf16", 0.5)), None),
        ("bf16", [], None),
        ("bf16", tried(("host", "1"), ("bf16", None), ("bf16", True), ("bf16", -1), ("bf16", 10**400)), None),
        ("bf16", [{}, {"loss": 1}], None),
    ],
)
def test_how_much_faster_than_the_plain_plan(plan: str, candidates: Any, expected: float | None) -> None:
    made = report()
    made.speed.plan, made.speed.candidates = plan, candidates
    found = faster(made.data()["speed"])
    assert found == (None if expected is None else pytest.approx(expected))


def test_plans_that_did_not_pay_are_told() -> None:
    made = report()
    made.speed.candidates, made.speed.reason = tried(("host", 1.0)), "no plan won"  # the other failed
    assert "Plans were tried, and the run keeps host (no plan won)." in words(made)
    made.speed.candidates = []
    assert "No other plan was timed (no plan won)." in words(made)


def test_the_headline_is_speed_and_exactness() -> None:
    made = report()
    assert verdict(made.data()).headline == "Ran at the host's own speed, exactly the big batch"
    made.speed.plan, made.speed.candidates = "bf16", tried(("host", 1.0), ("bf16", 0.5))
    assert verdict(made.data()).headline == "2.00 times as fast as the plain plan, exactly the big batch"
    made.window.exact = False
    made.speed.candidates = tried(("fp32", 1.0), ("bf16", 0.5))
    assert verdict(made.data()).headline == "2.00 times as fast as plan fp32, not exactly the big batch"
    made.window.updates = 0
    assert verdict(made.data()).headline == "No update was made"


def test_a_healthy_run_needs_nothing() -> None:
    found = verdict(report().data())
    assert found.advice == []
    assert Mark.BAD not in [finding.mark for finding in found.findings]


@pytest.mark.parametrize(
    ("part", "field", "value", "expected"),
    [
        ("window", "skipped_updates", 40, "Lower the learning rate"),
        ("window", "updates", 0, "no update was made"),
        ("speed", "loader_wait_fraction", 0.4, "40% of the time waits"),
        ("gradients", "without_gradient", ["head.a", "head.b"], "got no gradient: head.a, head.b"),
        ("batchnorm", "micro_batch_too_small", True, "batchnorm=freeze"),
        ("losses", "valid", [(1, 3.0), (2, 2.0), (3, 1.0)], "Train longer"),
        ("losses", "valid", [(1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)], "Take the weights of update 2"),
    ],
)
def test_what_to_do_next(part: str, field: str, value: Any, expected: str) -> None:
    made = report()
    setattr(getattr(made, part), field, value)
    advice = verdict(made.data()).advice or []
    assert [line for line in advice if expected in line], advice


def test_memory_near_its_limit_asks_for_smaller_micro_batches() -> None:
    made = report()
    made.memory.steady_peak_gib, made.memory.limit_gib = 7.6, 8.0
    assert any("95% of memory" in line for line in verdict(made.data()).advice or [])
    made.memory.steady_peak_gib = 4.0
    assert verdict(made.data()).advice == []


def test_a_long_list_of_names_is_cut() -> None:
    made = report()
    made.gradients.without_gradient = [f"p{n}" for n in range(1000)]
    (line,) = verdict(made.data()).advice or []
    assert line.endswith("p4 and 995 more.")
