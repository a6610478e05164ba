"""The compile worker in a run: real processes, stood in for where they are to end at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from plugins.core.autotune import background_compile, cost_model
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.autotune.plan_file import PLAN_NAME
from plugins.core.compile import worker as compile_worker
from plugins.core.compile.decision import CompileOutcome, CompileResult, CompileStage
from plugins.core.plan import Plan
from tests.core.compile.stand_ins import COMPILED, READY, fusable, new_host, run, stand_in
from tests.core.planned import OF, Host, by_name
from tests.core.tiny import same, snapshot


def test_ready_code_is_changed_over_to(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, READY)
    tuner = run(host, tmp_path)
    assert tuner.plan == COMPILED
    assert [s.update for s in tuner.switches] == [5]  # begun at 4, once three steps were timed
    facts = host.open.report.compile
    assert facts.reason.startswith("0.5 s a step, eager 1 s")
    assert facts.break_even_update is not None
    assert facts.graphs >= 1
    assert host.said == []
    assert all(m._compiled_call_impl is None for m in host.model.modules())


def test_a_run_goes_through_the_stages_of_its_compile(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    stages: list[CompileStage] = []

    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        stages.append(host.open.compilation.decision.stage)
        if update == 7:
            host.open.compilation.stay_eager(CompileOutcome(CompileResult.OVER_BUDGET, "too many", retryable=False))

    tuner = run(host, each=each)
    waiting, running, eager = CompileStage.WAITING, CompileStage.RUNNING, CompileStage.EAGER
    assert stages == [waiting] * 5 + [CompileStage.COMPILING] + [running] * 2 + [eager] * 2
    assert host.open.compilation.decision.outcome.outcome is CompileResult.OVER_BUDGET
    assert tuner.background.findings.settled


def test_what_the_report_says_decides_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)

    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        facts = host.open.report.compile
        facts.decision, facts.reason = "eager", "its worker failed: a module named Errno was killed"

    tuner = run(host, each=each)
    assert tuner.plan == COMPILED
    assert host.open.report.compile.decision == "regional"
    assert host.open.report.compile.reason.startswith("0.5 s a step, eager 1 s")


def test_code_that_does_not_win_is_not_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    host.costs = by_name(host=1.0, compiled=1.0)
    tuner = run(host)
    assert tuner.plan == Plan()
    assert tuner.switches == []
    assert "does not win" in host.open.report.compile.reason
    assert host.open.report.compile.decision == "eager"
    assert all(m._compiled_call_impl is None for m in host.model.modules())


def test_in_the_hosts_bf16_as_well(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is found there is no lesson for a run of the same model in fp32."""
    stand_in(monkeypatch, READY)
    monkeypatch.setattr(background_compile, "fusable_share", lambda *args: fusable(*args) and 0.12)
    host.host_precision = "bf16"
    tuner = run(host, cache_dir=tmp_path, precision="host")
    assert "12% of a step" in tuner.background.findings.reason
    assert not tuner.background.findings.settled  # another batch may have more
    again, other = new_host(host.clock), new_host(host.clock)
    again.host_precision = "bf16"
    assert run(again, cache_dir=tmp_path, precision="host").cached.key == tuner.cached.key
    assert run(other, cache_dir=tmp_path, precision="host").cached.key != tuner.cached.key


@pytest.mark.parametrize("share", [0.12, 0.5])
def test_in_bf16_on_a_cpu_a_compile_needs_more_to_fuse(
    host: Host, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    stand_in(monkeypatch, READY)
    monkeypatch.setattr(background_compile, "fusable_share", lambda *args: fusable(*args) and share)
    tuner = run(host, precision="bf16")
    assert tuner.plan == Plan("bf16", compile="regional" if share == 0.5 else "eager")
    assert ("12% of a step" in tuner.background.findings.reason) == (share == 0.12)


def test_eager_and_compiled_steps_are_timed_in_turn(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others slow down, more and more, decides nothing."""
    stand_in(monkeypatch, READY)
    load = iter(range(1, 1000))
    host.costs = lambda plan: 1.0 + 0.1 * next(load) * (host.open.tuner.state == "compiling")
    assert run(host).plan == Plan()
    plain, compiled = host.open.tuner.timings
    assert compiled.middle - plain.middle == pytest.approx(0.1)
    assert len(plain.seconds) == len(compiled.seconds) == cost_model.repeats(OF)


def test_a_compiled_loss_that_is_another_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    host.wrong = lambda plan: 5.0 if plan.compile != "eager" else 0.0
    tuner = run(host)
    assert tuner.plan == Plan()
    assert "dropped, its loss" in tuner.background.findings.reason
    assert sum("dropped, its loss" in line for line in host.said) == 1


@pytest.mark.parametrize("bad", [1, 3])
def test_a_batch_whose_loss_is_not_finite_judges_no_compile(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: int
) -> None:
    stand_in(monkeypatch, READY)

    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        host.wrong = lambda plan: float("nan") if 5 <= update < 5 + bad else 0.0

    tuner = run(host, each=each, cache_dir=tmp_path / "cache")
    assert [(s.update, s.plan) for s in tuner.switches] == ([(6, COMPILED)] if bad == 1 else [])
    assert ("not finite on 3 batches" in tuner.background.findings.reason) == (bad == 3)
    assert len(list(PlanCache(tmp_path / "cache").entries())) == (bad == 1)


def test_a_compile_that_loses_leaves_the_weights_of_an_eager_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    host.costs = by_name(host=1.0, compiled=2.0)
    run(host)
    plain = new_host(host.clock)
    plain.run(10, plan="off", precision="host")
    assert same(snapshot(host.model), snapshot(plain.model))


def test_a_run_that_changed_over_is_the_run_with_its_file(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    run(host, tmp_path)
    again = new_host(host.clock)
    tuner = run(again, plan=tmp_path / PLAN_NAME)
    assert tuner.switches == host.open.tuner.switches != []
    assert same(snapshot(again.model), snapshot(host.model))


def test_where_no_core_is_free_a_short_compile_is_made_in_the_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: False)
    monkeypatch.setattr(background_compile, "may_limit", lambda: True)
    monkeypatch.setattr(compile_worker, "command", lambda: pytest.fail("no worker"))
    tuner = run(host, each=lambda update: None)
    assert [(s.update, s.plan) for s in tuner.switches] == [(4, COMPILED)]
    assert "for which the run waited" in tuner.background.findings.reason


@pytest.mark.parametrize("long", [True, False], ids=["long", "without a limit"])
def test_where_no_core_is_free_the_run_waits(host: Host, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: False)
    monkeypatch.setattr(background_compile, "may_limit", lambda: long)
    if long:
        monkeypatch.setattr(background_compile, "IN_RUN_SECONDS", 0.0)
    stand_in(monkeypatch, "import time; time.sleep(1)")
    tuner = run(host, each=lambda update: None)
    assert [(s.update, s.plan) for s in tuner.switches] == [(4, COMPILED)]
    assert "for which the run waited" in tuner.background.findings.reason


def test_a_spare_core_is_one_that_training_does_not_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    for threads, spare in ((1, True), (2, False), (3, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert background_compile.has_spare_core(torch.device("cpu")) is spare
        assert background_compile.has_spare_core(torch.device("cuda"))


def test_a_run_too_short_says_how_many_updates_a_compile_needs(host: Host) -> None:
    host.run(8, of=30, compile="auto", compile_backend="eager")
    assert host.losses == 8
    assert "pays in a run of about 78 updates or more; 26 are left" in host.open.report.compile.reason
