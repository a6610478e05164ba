"""A planned loop that is resumed, or run again by its plan file, is the straight run bit for bit."""

from __future__ import annotations

import pytest

from plugins.core.autotune.plan_file import PLAN_NAME, Switch, write_switches
from plugins.core.plan import Plan
from tests.core.planned import BOTH_PLAN as BOTH
from tests.core.tiny import same
from tests.loop.planned import Loop

pytestmark = pytest.mark.usefixtures("_own_cache")


def test_the_run_with_the_plan_is_the_run_with_its_file(clock, tmp_path):
    measured = Loop(clock).run()
    assert measured.losses > 14
    measured.accel.end(tmp_path)
    given = Loop(clock, plan=tmp_path / PLAN_NAME).run()
    assert given.losses == 14
    assert given.tuner.switches == measured.tuner.switches != []
    assert same(given.state(), measured.state())
    given.accel.end(tmp_path / "again")
    assert (tmp_path / PLAN_NAME).read_text() == (tmp_path / "again" / PLAN_NAME).read_text()


@pytest.mark.parametrize("at", [5, 6, 9])
@pytest.mark.parametrize("source", ["measured", "remembered", "file"])
def test_a_resumed_run_equals_the_straight_one(clock, tmp_path, at, source):
    """Saved in the middle of a window, and before one in which the file switches."""
    options = {"accumulate": 2}
    if source == "remembered":
        Loop(clock, **options).run()
    if source == "file":
        options["plan"] = write_switches(tmp_path, Plan(), [Switch(2, BOTH), Switch(3, Plan("bf16")), Switch(5, BOTH)])
    batches, half = list(Loop(clock).loader) * 2, tmp_path / "half.pt"
    straight = Loop(clock, **options)
    for done, batch in enumerate(batches):
        if done == at:
            straight.accel.save(half)
        straight.step(*batch)
    second = Loop(clock, **options)
    second.accel.resume(half)
    second.done = at
    for batch in batches[at:]:
        second.step(*batch)
    assert second.losses == 14 - at
    assert second.tuner.plan == straight.tuner.plan == BOTH
    assert same(second.state(), straight.state())


def test_what_the_settings_fix_holds_when_resumed(clock, tmp_path):
    first = Loop(clock).run()
    assert first.tuner.plan == BOTH
    first.accel.save(tmp_path / "last.pt")
    second = Loop(clock, plan="off", precision="fp32", memory_format="host")
    second.accel.resume(tmp_path / "last.pt")
    second.run(1)
    assert second.tuner.plan == Plan("fp32")
    assert second.accel.dtype is None


def test_a_file_of_a_run_in_which_nothing_won_is_that_run(clock, tmp_path):
    Loop(clock, {}).run().accel.end(tmp_path)
    loop = Loop(clock, plan=tmp_path / PLAN_NAME).run()
    assert loop.tuner.plan == Plan()
    assert loop.accel.dtype is None


def test_the_plan_file_of_a_resumed_run_holds_what_was_switched_before(clock, tmp_path):
    first = Loop(clock).run()
    first.accel.save(tmp_path / "half.pt")
    second = Loop(clock)
    second.accel.resume(tmp_path / "half.pt")
    second.run(1)
    assert second.tuner.switches == first.tuner.switches == [Switch(4, BOTH)]


def test_a_resumed_run_that_has_not_measured_learns_under_its_own_shape(clock, tmp_path):
    early = Loop(clock)
    for batch in list(early.loader)[:2]:
        early.step(*batch)
    early.accel.save(tmp_path / "early.pt")
    findings = Loop(clock).run()
    again = Loop(clock)
    again.accel.resume(tmp_path / "early.pt")
    again.run(1)
    assert again.tuner.cached.key == findings.tuner.cached.key
    assert again.tuner.outcome.reason == "remembered from an earlier run"
