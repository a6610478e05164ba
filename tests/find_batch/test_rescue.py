"""The steps that are taken where nothing fits: their order, what is kept, and where they end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plugins.config import AccelConfig
from plugins.errors import AccelError
from plugins.find_batch.rescue import STEPS, Step, rescue, taken
from plugins.find_batch.search import Measurement, Outcome
from plugins.trial_run.probes import PROBES

SAVES = {"accumulation": -0.1, "autocast": 0.0, "activation checkpointing": 0.5, "freezing": 0.4}
NAMES = [step.name for step in STEPS]


class Job:
    """Starts at 2 GiB; every step takes its share off."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[list[str]] = []
        self.fails = fails

    def __call__(self, steps: Sequence[Step]) -> Measurement:
        self.asked.append([step.name for step in steps])
        if self.fails in self.asked[-1]:
            raise AccelError("command=x: failed")
        return Measurement(1, Outcome.DONE, 2.0 - sum(SAVES.get(step.name, 0.0) for step in steps), 0.1)


def test_the_steps_come_in_their_order_and_end_where_it_fits() -> None:
    job = Job()
    tried = rescue(job, 1.7)
    assert [one.step.name for one in tried] == NAMES[:4]
    assert [one.kept for one in tried] == [True, True, False, True]  # autocast took nothing off
    assert job.asked[-1] == ["the smallest micro-batch", "accumulation", "activation checkpointing"]
    last = tried[-1].measured
    assert last is not None
    assert last.peak_gib == pytest.approx(1.6)


def test_a_step_that_fails_or_needs_what_is_not_installed_is_said_and_left_out() -> None:
    steps = [
        Step(name) if name != "8-bit optimizer states" else Step(name, needs=("no_such_library",)) for name in NAMES
    ]
    tried = rescue(Job(fails="freezing"), 0.1, steps)
    why = {one.step.name: one.why for one in tried if one.measured is None}
    assert why == {"freezing": "command=x: failed", "8-bit optimizer states": "needs no_such_library"}
    assert not any(one.kept for one in tried if one.measured is None)


def test_a_step_that_is_nothing_for_the_device_is_not_measured() -> None:
    job = Job()
    tried = rescue(job, 1.7, pointless={"autocast": "no bf16 instructions here"})
    assert (tried[2].measured, tried[2].why) == (None, "no bf16 instructions here")
    assert not any("autocast" in steps for steps in job.asked)


def test_a_job_that_does_not_run_at_all_is_an_error() -> None:
    with pytest.raises(AccelError, match="failed"):
        rescue(Job(fails=NAMES[0]), 1.0)


def test_without_accumulation_the_smallest_micro_batch_is_no_answer() -> None:
    tried = rescue(Job(), 5.0)
    assert [one.step.name for one in tried] == NAMES[:2]


def test_later_settings_win() -> None:
    assert taken(STEPS[:3]) == {"accumulate": 2, "precision": "bf16"}


def test_what_a_step_asks_of_a_trial_is_there() -> None:
    fields = {field.alias or name for name, field in AccelConfig.model_fields.items()}
    for step in STEPS:
        assert set(step.checks) <= set(PROBES)
        assert set(step.settings) <= fields
