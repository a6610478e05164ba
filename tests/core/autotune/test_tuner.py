from __future__ import annotations

import copy
import json
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from plugins.core import session
from plugins.core.autotune import cost_model
from plugins.core.autotune import tuner as planner_module
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.autotune.plan_file import PLAN_NAME, Switch, write_switches
from plugins.core.autotune.timing import WindowStart
from plugins.core.checkpoint.rng_state import set_random_state
from plugins.core.compile.decision import TuningStage
from plugins.core.plan import Plan
from plugins.core.step.precision import bf16_is_fast
from tests.core.planned import OF, Blocks, Clock, Host, Net, by_name
from tests.core.tiny import same, snapshot

BOTH_PLAN = Plan("bf16", "channels_last")
BOTH_WIN = {"host": 1.0, "bf16": 0.8, "channels_last": 0.7, "both": 0.5}
UPDATES = 10  # of a run that is said to have 1,000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    return Clock(monkeypatch)


def names(host: Host) -> list[str]:
    return [timing.plan.name for timing in host.open.tuner.timings]


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


# -- everything is put back ---------------------------------------------------------------------------------------


def state_of(host: Host) -> dict[str, Any]:
    held = host.open
    return {
        "model": snapshot(host.model),
        "strides": {n: p.stride() for n, p in host.model.named_parameters()},
        "gradients": [p.grad for p in host.model.parameters()],
        "optimizer": copy.deepcopy(host.optimizer.state_dict()),
        "window": copy.deepcopy(held.window.state_dict()),
        "kept": [t.clone() for t in held.statistics._kept],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "counts": held.recorder.state_dict(),
        "training": [m.training for m in host.model.modules()],
    }


@pytest.mark.parametrize("wins", [True, False])
def test_a_trial_puts_everything_back_bit_for_bit(clock: Clock, wins: bool) -> None:
    host = Host(clock, by_name(**BOTH_WIN) if wins else by_name())
    held = host.run(4, end=False)
    host.x = torch.rand(host.shape)
    held.micro_batch(len(host.x))
    before = state_of(host)
    held.plan_window(host, OF, host.x.shape)
    assert names(host)[:2] == ["host", "bf16 + channels_last"]
    after = state_of(host)
    if wins:
        assert before.pop("strides") != after.pop("strides")
    for part, value in before.items():
        assert same(value, after[part]), part


class Moving(Net):
    """Buffers that a forward moves, in place and by putting another tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.utils.parametrizations.spectral_norm(self.head)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.last = x.detach().mean()
        return super().forward(x)


def test_a_trial_that_loses_leaves_every_buffer_as_it_was(clock: Clock) -> None:
    tried, plain = Host(clock, by_name(), Moving), Host(clock, by_name(), Moving)
    tried.run(UPDATES)
    plain.run(UPDATES, plan="off", precision="host")
    assert tried.losses > plain.losses == tried.model.seen
    assert same(snapshot(tried.model), snapshot(plain.model))


@pytest.mark.parametrize("keep", [True, False])
def test_a_trial_leaves_no_gradient_on_a_criterions_parameters(clock: Clock, keep: bool) -> None:
    """The next update would add to it: the optimizer holds them, the model does not."""
    host = Host(clock, by_name())
    own = torch.nn.Parameter(torch.ones(()))
    host.optimizer.add_param_group({"params": [own]})
    held = host.session()
    held.update.keep_gradients = lambda: keep
    with held.guard.untouched():
        own.square().backward()
    assert (own.grad == 0) if keep else own.grad is None
    held.end()


def test_two_runs_of_a_seed_give_the_same_weights(clock: Clock) -> None:
    first, second = (Host(clock, by_name(**BOTH_WIN)) for _ in range(2))
    for host in (first, second):
        host.run(UPDATES)
    assert first.open.tuner.switches
    assert same(snapshot(first.model), snapshot(second.model))


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


def test_two_switches_of_one_update_are_both_made_there(clock: Clock, tmp_path: Path) -> None:
    switches = [Switch(3, Plan("bf16")), Switch(3, Plan("bf16", "channels_last")), Switch(5, Plan())]
    file = write_switches(tmp_path, Plan(), switches)
    seen: list[Plan] = []
    host = Host(clock, by_name())
    tuner = host.run(UPDATES, plan=file, each=lambda update: seen.append(host.plan)).tuner
    assert tuner.switches == switches
    assert seen[1:] == [Plan()] * 3 + [Plan("bf16", "channels_last")] * 2 + [Plan()] * 4


def test_a_trial_that_loses_leaves_the_run_as_it_was(clock: Clock) -> None:
    tried, plain = Host(clock, by_name()), Host(clock, by_name())
    tried.run(UPDATES)
    plain.run(UPDATES, plan="off", precision="host")
    assert tried.losses > plain.losses
    assert same(snapshot(tried.model), snapshot(plain.model))


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


# -- what earlier runs learnt -------------------------------------------------------------------------------------


def test_a_second_run_starts_with_the_plan(clock: Clock, tmp_path: Path) -> None:
    Host(clock, by_name(**BOTH_WIN)).run(UPDATES, cache_dir=tmp_path)
    host = Host(clock, by_name(**BOTH_WIN))
    tuner = host.run(UPDATES, cache_dir=tmp_path).tuner
    assert host.losses == UPDATES
    assert [(s.update, s.plan) for s in tuner.switches] == [(0, Plan("bf16", "channels_last"))]
    assert "remembered" in tuner.outcome.reason


def test_what_does_not_win_is_remembered_too(clock: Clock, tmp_path: Path) -> None:
    for tries in (True, False):
        host = Host(clock, by_name())
        host.run(UPDATES, cache_dir=tmp_path)
        assert (host.losses > UPDATES) is tries


def test_a_longer_run_tries_what_a_shorter_one_could_not(clock: Clock, tmp_path: Path) -> None:
    seconds = by_name(host=1.0, both=0.9, channels_last=0.9, bf16=0.5)
    for of, tries, plan in (
        (220, 1, Plan("bf16", "channels_last")),
        (220, 0, Plan("bf16", "channels_last")),
        (1000, 3, Plan("bf16")),
    ):
        host = Host(clock, seconds)
        tuner = host.run(UPDATES, of=of, cache_dir=tmp_path).tuner
        assert tuner.plan == plan
        assert len([t for t in tuner.timings if t.plan != Plan()]) == tries


@pytest.mark.parametrize(
    "change", [{"clip_norm": 1.0}, {"precision": "fp32"}, {"memory_format": "host"}, {"compile_mode": "max-autotune"}]
)
def test_other_settings_are_other_work(clock: Clock, tmp_path: Path, change: dict[str, Any]) -> None:
    Host(clock, by_name(**BOTH_WIN)).run(UPDATES, cache_dir=tmp_path)
    Host(clock, by_name(**BOTH_WIN)).run(UPDATES, cache_dir=tmp_path, **change)
    entries = list(PlanCache(tmp_path).entries())
    assert len(entries) == (1 if "clip_norm" in change else 2)


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": {"precision": "fp16"}},
        {"plan": {"compile": "whole"}},
        {"plan": []},
        {"tried": None},
        {"step_seconds": 0},
    ],
)
def test_an_entry_that_is_none_is_measured_anew(clock: Clock, tmp_path: Path, damage: dict[str, Any]) -> None:
    Host(clock, by_name(**BOTH_WIN)).run(UPDATES, cache_dir=tmp_path)
    (entry,) = PlanCache(tmp_path).entries()
    entry.path.write_text(json.dumps({**json.loads(entry.path.read_text()), **damage}))
    host = Host(clock, by_name(**BOTH_WIN))
    host.run(UPDATES, cache_dir=tmp_path)
    assert host.losses > UPDATES
    assert sum("measuring anew" in line for line in host.said) == 1


def test_a_device_without_fast_bf16_does_not_run_a_remembered_one(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(clock, by_name(**BOTH_WIN)).run(UPDATES, cache_dir=tmp_path)
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    host = Host(clock, by_name(host=1.0, channels_last=0.5))
    assert host.run(UPDATES, cache_dir=tmp_path).tuner.plan == Plan(memory_format="channels_last")


def test_a_folder_that_cannot_be_used_is_said_at_the_start_and_once(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    host = Host(clock, by_name(**BOTH_WIN))
    told: list[int] = []

    def lines() -> list[str]:
        return [line for line in host.said if "not remembered" in line]

    host.run(UPDATES, each=lambda update: told.append(len(lines())), cache_dir=tmp_path / "file")
    assert told[1] == len(lines()) == 1
