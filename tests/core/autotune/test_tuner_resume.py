from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from plugins.core.autotune.plan_file import PLAN_NAME, Switch, write_switches
from plugins.core.autotune.timing import WindowStart
from plugins.core.checkpoint.rng_state import set_random_state
from plugins.core.plan import Plan
from tests.core.planned import BOTH_PLAN, BOTH_WIN, OF, UPDATES, Blocks, Clock, Host, Net, by_name
from tests.core.tiny import same, snapshot


def test_a_run_with_the_plan_is_the_run_with_its_file(clock: Clock, tmp_path: Path) -> None:
    measured = Host(clock, by_name(**BOTH_WIN))
    measured.run(UPDATES, tmp_path)
    given = Host(clock, by_name(**BOTH_WIN))
    tuner = given.run(UPDATES, tmp_path / "again", plan=tmp_path / PLAN_NAME).tuner
    assert given.losses == UPDATES
    assert tuner.timings == []
    assert tuner.switches == measured.open.tuner.switches != []
    assert same(snapshot(given.model), snapshot(measured.model))
    assert (tmp_path / PLAN_NAME).read_text() == (tmp_path / "again" / PLAN_NAME).read_text()


def test_resume_keeps_the_plan(clock: Clock) -> None:
    whole, first, second = (Host(clock, by_name(**BOTH_WIN)) for _ in range(3))
    whole.run(UPDATES)
    held = first.run(6, end=False)
    state = copy.deepcopy(held.state_dict())
    again = second.session()
    again.load_state_dict(state)
    set_random_state(state["random"])
    assert again.tuner.plan == Plan()  # at its next window
    second.run(UPDATES, first=6)
    assert again.tuner.plan == second.plan == Plan("bf16", "channels_last")
    assert again.tuner.timings == []
    assert same(snapshot(second.model), snapshot(whole.model))


def test_a_run_saved_before_it_measured_measures_when_resumed(clock: Clock) -> None:
    first, second = (Host(clock, by_name(**BOTH_WIN)) for _ in range(2))
    state = copy.deepcopy(first.run(2, end=False).state_dict())
    again = second.session()
    again.load_state_dict(state)
    second.run(UPDATES, first=2)
    assert again.tuner.plan == Plan("bf16", "channels_last")
    assert again.tuner.timings


def test_a_resumed_run_keeps_what_its_settings_fix(clock: Clock) -> None:
    held = Host(clock, by_name()).session(precision="fp32")
    held.tuner.resume(BOTH_PLAN, 5)
    assert held.tuner.due(5) == Plan("fp32", "channels_last")
    held = Host(clock, by_name()).session(plan="off", precision="fp32", memory_format="host")
    held.tuner.resume(BOTH_PLAN, 5)
    assert held.tuner.due(5) == Plan("fp32")
    assert not held.tuner.waits


def test_a_resumed_run_makes_the_switches_of_its_file(clock: Clock, tmp_path: Path) -> None:
    """Those before it at once and as one, that of its first update too, and the later ones in their turn."""
    switches = [Switch(1, Plan("bf16")), Switch(5, Plan("host", "channels_last")), Switch(8, BOTH_PLAN)]
    path = write_switches(tmp_path, Plan(), switches)
    for update, due in ((0, Plan()), (4, Plan("bf16")), (5, Plan("host", "channels_last")), (9, BOTH_PLAN)):
        host = Host(clock, by_name())
        host.session(plan=path).tuner.resume(Plan("bf16"), update)
        assert host.open.tuner.due(update) == due
        host.open.tuner.at_window(WindowStart(host, update, OF, host.shape))
        assert host.plan == due
        assert host.open.tuner.given == [switch for switch in switches if switch.update > update]


@pytest.mark.parametrize(
    ("model", "options", "may"),
    [
        (Blocks, {"compile": "auto"}, True),
        (Blocks, {"compile": "off"}, False),
        (Blocks, {"compile": "auto", "plan": "off"}, False),
        (Blocks, {"compile": "on", "compile_backend": "eager", "plan": "off"}, True),
        (Net, {"compile": "auto"}, False),  # convolutions, on a CPU
    ],
)
def test_whether_a_run_may_come_to_compile(clock: Clock, model: Any, options: dict[str, Any], may: bool) -> None:
    held = Host(clock, by_name(), model, (4, 6) if model is Blocks else (4, 3, 8, 8)).session(**options)
    assert held.tuner.may_compile is may
    held.end()


def test_a_run_whose_file_compiles_may_compile(clock: Clock, tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan(), [Switch(3, Plan(compile="whole"))])
    assert Host(clock, by_name()).session(plan=path, compile="auto").tuner.may_compile


def test_a_file_does_not_overrule_compile_off(clock: Clock, tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan(), [Switch(2, Plan("bf16", compile="regional")), Switch(4, Plan("bf16"))])
    held = Host(clock, by_name(), Blocks, (4, 6)).run(UPDATES, plan=path, compile="off")
    assert held.tuner.switches == [Switch(2, Plan("bf16"))]
    assert held.report.compile.decision == "eager"
    assert held.report.compile.reason == "compile=off, which a plan file does not overrule"
    assert held.report.compile.graphs == 0


@pytest.mark.parametrize("plan", ["auto", "off"])
def test_a_resumed_run_does_not_overrule_compile_off(clock: Clock, plan: str) -> None:
    tuner = Host(clock, by_name(), Blocks, (4, 6)).session(plan=plan, compile="off").tuner
    tuner.resume(Plan(compile="regional"), 0)
    assert tuner.due(0).compile == "eager"


def test_resume_at_a_switch_of_the_file_makes_it(clock: Clock, tmp_path: Path) -> None:
    file = write_switches(tmp_path, Plan(), [Switch(2, Plan("bf16")), Switch(6, Plan("bf16", "channels_last"))])
    whole, first, second = (Host(clock, by_name()) for _ in range(3))
    whole.run(UPDATES, plan=file)
    state = copy.deepcopy(first.run(6, plan=file, end=False).state_dict())
    again = second.session(plan=file)
    again.load_state_dict(state)
    set_random_state(state["random"])
    second.run(UPDATES, first=6)
    assert again.tuner.plan == Plan("bf16", "channels_last")
    assert same(snapshot(second.model), snapshot(whole.model))
