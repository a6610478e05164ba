from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plugins.core import session
from plugins.core.autotune import cost_model
from plugins.core.autotune import tuner as planner_module
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.autotune.plan_file import Switch, write_switches
from plugins.core.compile.decision import TuningStage
from plugins.core.plan import Plan
from plugins.core.step.precision import bf16_is_fast
from tests.core.planned import BOTH_PLAN, BOTH_WIN, OF, UPDATES, Blocks, Clock, Host, by_name, names

# -- who wins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        (BOTH_WIN, Plan("bf16", "channels_last")),
        ({"host": 1.0, "both": 2.0, "bf16": 2.0, "channels_last": 0.9}, Plan("host", "channels_last")),
        ({"host": 1.0, "both": 0.9, "bf16": 0.7, "channels_last": 1.1}, Plan("bf16")),
        ({"host": 1.0, "both": 1.2, "bf16": 1.1, "channels_last": 1.1}, Plan()),
        ({"host": 1.0, "both": 1.0, "bf16": 1.0, "channels_last": 1.0}, Plan()),
    ],
)
def test_the_fastest_plan_runs(clock: Clock, tmp_path: Path, seconds: dict[str, float], winner: Plan) -> None:
    host = Host(clock, by_name(**seconds))
    tuner = host.run(UPDATES, tmp_path, cache_dir=tmp_path / "cache").tuner
    assert tuner.plan == host.plan == winner
    speed = json.loads((tmp_path / "accel_report.json").read_text())["speed"]
    assert speed["plan"] == winner.name
    order = {"host": "host", "both": "bf16 + channels_last", "channels_last": "channels_last", "bf16": "bf16"}
    timed = [name for key, name in order.items() if seconds[key] <= cost_model.HOPELESS]
    assert [c["plan"] for c in speed["candidates"]] == timed
    assert ("no plan won" if winner == Plan() else f"{winner.name}: ") in speed["reason"]
    assert [s.plan for s in tuner.switches] == ([winner] if winner != Plan() else [])


def test_a_candidate_within_the_spread_does_not_win(clock: Clock) -> None:
    swing = cycle([1.1, 1.0, 1.1])
    host = Host(clock, lambda plan: next(swing) * (0.99 if plan != Plan() else 1.0))
    tuner = host.run(UPDATES).tuner
    assert tuner.plan == Plan()
    assert "spread" in tuner.outcome.reason


def test_a_hopeless_candidate_takes_one_step(clock: Clock) -> None:
    host = Host(clock, by_name(host=1.0, bf16=5.0, channels_last=5.0, both=5.0))
    host.run(5, end=False)
    before = host.losses
    host.open.tuner.state, host.open.tuner._layout_known = TuningStage.TIMING, False
    host.open.plan_window(host, OF, host.x.shape)
    assert host.losses - before == cost_model.REPEATS + 3
    assert names(host)[-1] == "host"


def test_a_wrong_loss_is_dropped(clock: Clock) -> None:
    host = Host(clock, by_name(**BOTH_WIN))
    host.wrong = lambda plan: 5.0 if plan.precision == "bf16" else 0.0
    assert host.run(UPDATES).tuner.plan == Plan("host", "channels_last")
    assert sum("dropped, its loss" in line for line in host.said) == 2


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_batches_whose_loss_is_not_finite_decide_nothing(clock: Clock, tmp_path: Path, bad: int) -> None:
    """A trial is put off to a later batch, twice."""
    host = Host(clock, by_name(**BOTH_WIN))
    first = planner_module.PLAIN_STEPS + 1

    def each(update: int) -> None:
        host.wrong = lambda plan: float("nan") if first <= update < first + bad else 0.0

    tuner = host.run(UPDATES, each=each, cache_dir=tmp_path).tuner
    assert not any("dropped" in line for line in host.said)
    assert len(names(host)) == (4 if bad < planner_module.UNFIT_BATCHES else 0)
    if bad < planner_module.UNFIT_BATCHES:
        assert tuner.switches == [Switch(first + bad, BOTH_PLAN)]
    else:
        assert tuner.switches == []
        assert "the loss was not finite on 3 batches" in tuner.outcome.reason
    assert len(list(PlanCache(tmp_path).entries())) == (bad < planner_module.UNFIT_BATCHES)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("not implemented for BFloat16")])
def test_a_candidate_that_fails_is_dropped(clock: Clock, error: Exception) -> None:
    host = Host(clock, by_name(**BOTH_WIN))
    host.fails = lambda plan: error if plan.memory_format == "channels_last" else None
    assert host.run(UPDATES).tuner.plan == Plan("bf16")
    dropped = [line for line in host.said if "dropped" in line]
    assert len(dropped) == 2
    assert ("out of memory" if isinstance(error, torch.OutOfMemoryError) else "RuntimeError") in dropped[0]


def test_a_run_too_short_to_win_a_trial_back_starts_at_once(clock: Clock) -> None:
    host = Host(clock, by_name(**BOTH_WIN))
    tuner = host.run(UPDATES, of=50).tuner
    assert host.losses == UPDATES
    assert tuner.plan == Plan()
    assert tuner.timings == []
    assert "too few" in tuner.outcome.reason


@pytest.mark.parametrize("of", [200, 300, 1000])
def test_trials_cost_at_most_two_percent(clock: Clock, of: int) -> None:
    host = Host(clock, by_name(host=1.0, both=0.6, bf16=0.6, channels_last=0.6))
    host.run(4, end=False, of=of)
    began = clock.now
    held = host.run(5, first=4, of=of)
    assert held.tuner.plan == Plan("bf16", "channels_last")
    assert clock.now - began - 0.6 <= cost_model.TRIAL_SHARE * of


@pytest.mark.parametrize("options", [{"plan": "off"}, {"precision": "fp32", "memory_format": "host"}])
def test_nothing_is_measured_where_nothing_is_open(clock: Clock, options: dict[str, Any]) -> None:
    host = Host(clock, by_name(**BOTH_WIN))
    tuner = host.run(UPDATES, **options).tuner
    assert host.losses == UPDATES
    assert tuner.timings == []
    as_the_device = "bf16" if bf16_is_fast(torch.device("cpu")) else "fp32"
    assert tuner.plan.precision == (as_the_device if options.get("plan") == "off" else "fp32")


def test_trials_are_not_the_steps_own_time(clock: Clock) -> None:
    host = Host(clock, by_name(**BOTH_WIN))
    series = host.run(UPDATES).series
    assert max(series.seconds) == pytest.approx(1.0)
    assert min(series.seconds) == pytest.approx(0.5)
    assert series.waiting == 0


# -- reasons in the report ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 3])
def test_a_run_that_ended_early_says_so(clock: Clock, updates: int) -> None:
    report = Host(clock, by_name(), Blocks, (4, 6)).run(updates, compile="auto").report
    assert report.speed.reason == report.compile.reason == "the run ended before anything was measured"


def test_a_run_that_is_not_asked_for_trials_says_so(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.Session, "plan_window", lambda *_: None)
    report = Host(clock, by_name(), Blocks, (4, 6)).run(UPDATES, compile="auto").report
    assert report.speed.reason == report.compile.reason == "the loop asked for no trial"


def test_the_plan_setting_is_the_reason(clock: Clock, tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan(), [Switch(2, Plan(compile="regional"))])
    options = {"compile": "auto", "compile_backend": "eager"}
    for plan, words in ((path, f"as plan={path} says"), ("off", "plan=off measures nothing")):
        report = Host(clock, by_name(), Blocks, (4, 6)).run(5, plan=plan, **options).report
        assert report.speed.reason == report.compile.reason == words
        assert report.compile.decision == ("eager" if plan == "off" else "regional")


def test_several_ranks_are_the_reason(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(clock, by_name(), Blocks, (4, 6))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    held = host.session(compile="auto")
    held.tuner.sum_up(held.report.speed, held.report.compile)
    assert held.report.speed.reason.startswith("several ranks")
    assert held.report.compile.reason.startswith("several ranks")
    held.compilation.end()


def test_where_only_compile_is_open_there_is_no_layout_to_try(clock: Clock) -> None:
    report = Host(clock, by_name(), Blocks, (4, 6)).run(UPDATES, of=40, compile="auto", precision="fp32").report
    assert report.speed.reason == "there is no other precision or layout to try"
    assert "pays in a run of" in report.compile.reason


# -- windows ------------------------------------------------------------------------------------------------------


def test_a_plan_changes_between_windows_only(clock: Clock) -> None:
    host = Host(clock, by_name(**BOTH_WIN))
    held = host.session(size=4)
    plans: list[list[Plan]] = []
    for index in range(40):
        host.x = torch.rand(host.shape)
        first = held.window.empty
        held.micro_batch(len(host.x))
        if first:
            held.plan_window(host, 4000 - index, host.x.shape)
            plans.append([])
        (host.loss() * held.mean(len(host.x))).backward()
        plans[-1].append(host.plan)
        held.backward_done()
        held.idle()
    assert all(len(set(window)) == 1 for window in plans)
    assert plans[0][0] == plans[0][3] == Plan()
    assert plans[-1][0] == Plan("bf16", "channels_last")
    assert [s.update for s in held.tuner.switches] == [1]  # three steps are enough to know the plain one
