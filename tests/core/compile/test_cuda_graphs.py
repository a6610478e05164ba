"""CUDA graphs as a part of the plan. The device is said to have them; the compiler here ignores them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from examples import gpu_check
from plugins.core.autotune import background_compile, cost_model
from plugins.core.autotune.plan_cache import INDUCTOR, PlanCache
from plugins.core.autotune.plan_file import PLAN_NAME, Switch, write_switches
from plugins.core.checkpoint.rng_state import set_random_state
from plugins.core.compile import cuda_graphs as cudagraphs
from plugins.core.compile import worker as compile_worker
from plugins.core.plan import Plan
from tests.core.compile.stand_ins import READY, fusable, run, stand_in
from tests.core.planned import Blocks, Clock, Host, by_name
from tests.core.tiny import fault, same, snapshot

COMPILED = Plan(compile="regional")
GRAPHS = Plan(compile="regional", cuda_graphs=True)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """A loop of 1.0 s a step eagerly, 0.5 s compiled and 0.3 s with CUDA graphs, of 1,000 updates."""
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    monkeypatch.setattr(cudagraphs, "has_cuda_graphs", lambda device, backend: True)
    monkeypatch.setattr(background_compile, "fusable_share", fusable)
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: True)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "inductor"))
    stand_in(monkeypatch, READY)
    return new_host(Clock(monkeypatch))


def new_host(clock: Clock, **seconds: float) -> Host:
    return Host(clock, by_name(**{"host": 1.0, "compiled": 0.5, "graphs": 0.3, **seconds}), Blocks, (4, 6))


def switches(tuner: Any) -> list[tuple[int, Plan]]:
    return [(switch.update, switch.plan) for switch in tuner.switches]


def preallocated(host: Host) -> bool:
    return all(p.grad is not None and not p.grad.any() for p in host.model.parameters())


def dropped(host: Host) -> bool:
    return all(p.grad is None for p in host.model.parameters())


# -- who wins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({}, GRAPHS),
        ({"graphs": 0.5}, COMPILED),
        ({"graphs": 0.7}, COMPILED),
        ({"compiled": 1.2}, GRAPHS),
        ({"compiled": 1.2, "graphs": 1.0}, Plan()),
    ],
)
def test_they_run_where_they_beat_the_better_of_eager_and_compiled(
    host: Host, tmp_path: Path, seconds: dict[str, float], winner: Plan
) -> None:
    host = new_host(host.clock, **seconds)
    tuner = run(host, tmp_path)
    assert switches(tuner) == ([(5, winner)] if winner != Plan() else [])
    report = json.loads((tmp_path / "accel_report.json").read_text())
    better = COMPILED if "compiled" not in seconds else Plan()
    assert [c["plan"] for c in report["speed"]["candidates"]] == [
        "host",
        "regional compile",
        better.name,
        "regional compile + CUDA graphs",
    ]
    assert ("with CUDA graphs 0.3 s" if winner == GRAPHS else "CUDA graphs do not win") in report["compile"]["reason"]
    assert report["compile"]["mode"] == ("reduce-overhead" if winner == GRAPHS else "default")
    assert host.said == []


def test_the_worker_compiles_both(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(compile_worker.cloudpickle, "dump", lambda job, file: jobs.append(job))
    budgets = [run(host).background._budget]
    assert [way["mode"] for way in jobs[0]["ways"]] == ["default", "reduce-overhead"]
    monkeypatch.setattr(cudagraphs, "has_cuda_graphs", lambda device, backend: False)
    budgets.append(run(new_host(host.clock)).background._budget)
    assert [way["mode"] for way in jobs[1]["ways"]] == ["default"]
    assert budgets[0] >= budgets[1]


class Unused(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("shapes vary", {}),
        ("a mode of the user's own", {"compile_mode": "max-autotune-no-cudagraphs"}),
        ("no room", {}),
        ("a parameter without gradient", {}),
        ("the run is too short for two compiles", {}),
    ],
)
def test_where_they_are_no_candidate(
    host: Host, monkeypatch: pytest.MonkeyPatch, why: str, options: dict[str, Any]
) -> None:
    of = 1000
    if why == "no room":
        monkeypatch.setattr(background_compile.memory, "room_for_cuda_graphs", lambda device: False)
    if why == "a parameter without gradient":
        host = Host(host.clock, host.costs, Unused, (4, 6))
    if why == "the run is too short for two compiles":
        of = 120
    held = host.session
    if why == "shapes vary":

        def session(**given: Any) -> Any:
            made = held(**given)
            made.compilation.dims = (0,)
            return made

        monkeypatch.setattr(host, "session", session)
    tuner = run(host, of=of, **options)
    assert tuner.plan == COMPILED
    assert [t.plan for t in tuner.timings] == [Plan(), COMPILED]


def test_shapes_that_vary_may_be_static(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(host, dynamic="static").plan == GRAPHS


@pytest.mark.parametrize("fault", ["loss", "gradients", "error"])
def test_wrong_ones_are_dropped(host: Host, fault: str) -> None:
    """An accumulation that loses gradients is never chosen."""
    if fault == "loss":
        host.wrong = lambda plan: 5.0 if plan.cuda_graphs else 0.0
    elif fault == "gradients":
        host.overwrites = lambda plan: plan.cuda_graphs
    else:
        host.fails = lambda plan: RuntimeError("overwritten") if plan.cuda_graphs else None
    tuner = run(host)
    assert tuner.plan == COMPILED
    (line,) = host.said
    assert "plan regional compile + CUDA graphs: dropped, " in line
    assert {"loss": "its loss", "gradients": "do not add up", "error": "RuntimeError"}[fault] in line
    assert "CUDA graphs dropped" in tuner.background.findings.reason
    assert dropped(host)


def test_a_trial_leaves_the_weights_of_an_eager_run(host: Host) -> None:
    host = new_host(host.clock, compiled=2.0, graphs=2.0)
    run(host)
    plain = new_host(host.clock)
    plain.run(10, plan="off", precision="host")
    assert same(snapshot(host.model), snapshot(plain.model))


# -- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_are_kept_only_while_they_run(host: Host, tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan(), [Switch(2, GRAPHS), Switch(4, COMPILED), Switch(6, GRAPHS)])
    seen: list[tuple[bool, bool]] = []

    def each(update: int) -> None:
        seen.append((preallocated(host), dropped(host)))
        if update == 8:
            host.open.compilation.stay_eager(fault("a fault"))

    run(host, tmp_path, plan=path, each=each, compile="auto")
    kept, none = (True, False), (False, True)
    assert seen == [none, none, none, kept, kept, none, none, kept, kept, none]
    assert switches(host.open.tuner) == [(2, GRAPHS), (4, COMPILED), (6, GRAPHS), (8, Plan())]


def test_gradients_that_the_host_drops_are_there_again(host: Host) -> None:
    """As after a batch that did not fit into memory: one that a CUDA graph allocates would be overwritten."""
    found: list[bool] = []

    def each(update: int) -> None:
        if update == 8:
            host.model.zero_grad(set_to_none=True)
            host.overwrites = lambda plan: found.append(preallocated(host)) or False

    run(host, each=each, plan="off", compile="on", compile_mode="reduce-overhead")
    assert found == [True, True]


def test_a_fall_of_the_plan_is_remembered(host: Host, tmp_path: Path) -> None:
    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        if update == 7:
            host.open.compilation.stay_eager(fault("a fault"))

    assert switches(run(host, each=each, cache_dir=tmp_path)) == [(5, GRAPHS), (7, Plan())]
    assert dropped(host)
    assert switches(run(new_host(host.clock), cache_dir=tmp_path)) == []


# -- files, memory and resume -------------------------------------------------------------------------------------


def test_a_second_run_starts_with_them(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PlanCache, "has_code", lambda self, needed: True)
    run(host, cache_dir=tmp_path)
    again = new_host(host.clock)
    assert switches(run(again, cache_dir=tmp_path)) == [(0, GRAPHS)]
    assert again.losses == 10
    monkeypatch.setattr(background_compile.memory, "room_for_cuda_graphs", lambda device: False)
    assert switches(run(new_host(host.clock), cache_dir=tmp_path)) == [(0, COMPILED)]


def test_a_run_that_changed_over_is_the_run_with_its_file(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(host, tmp_path)
    again = new_host(host.clock)
    assert switches(run(again, plan=tmp_path / PLAN_NAME)) == [(5, GRAPHS)]
    assert same(snapshot(again.model), snapshot(host.model))
    monkeypatch.setattr(cudagraphs, "has_cuda_graphs", lambda device, backend: False)
    elsewhere = new_host(host.clock)
    assert switches(run(elsewhere, plan=tmp_path / PLAN_NAME)) == [(5, COMPILED)]
    assert any("CUDA graphs cannot run here" in line for line in elsewhere.said)


def test_a_resumed_run_keeps_them(host: Host) -> None:
    whole, second = new_host(host.clock), new_host(host.clock)
    run(whole)
    run(host, updates=7, end=False)
    state = copy.deepcopy(host.open.state_dict())
    options = {"compile": "auto", "compile_backend": "eager"}
    again = second.session(**options)
    again.load_state_dict(state)
    set_random_state(state["random"])
    second.run(10, first=7)
    assert again.tuner.plan == GRAPHS
    assert same(snapshot(second.model), snapshot(whole.model))


@pytest.mark.parametrize("given", [{"cuda_graphs": "yes", "compile": "whole"}, {"cuda_graphs": True}])
def test_a_plan_with_graphs_of_nothing_is_none(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cuda_graphs"):
        Plan.from_dict(given)


def test_a_plan_without_them_reads_as_it_always_did() -> None:
    assert COMPILED.as_dict() == {"precision": "host", "memory_format": "host", "compile": "regional"}
    assert Plan.from_dict(COMPILED.as_dict()) == COMPILED
    assert Plan.from_dict(GRAPHS.as_dict()) == GRAPHS


def test_the_check_of_a_gpu_ends_well_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, and a check of minutes")
    assert gpu_check.main() == 0
    assert "no CUDA device" in capsys.readouterr().out


# -- the real compiler --------------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_the_run_finds_both_codes_in_the_cache(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two graphs each, of which those of the code that lost count towards no budget."""
    monkeypatch.undo()
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    monkeypatch.setattr(cudagraphs, "has_cuda_graphs", lambda device, backend: True)
    monkeypatch.setattr(background_compile, "fusable_share", fusable)
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: True)
    host.clock = Clock(monkeypatch)
    counters.clear()
    torch._dynamo.reset()
    tuner = run(host, compile_backend="inductor", cache_dir=tmp_path / "cache", recompile_budget=2)
    assert switches(tuner) == [(5, GRAPHS)], tuner.background.findings
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] > 2
    assert host.said == []
