"""What a run learnt of its compile: its next one compiles at once, or asks again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from plugins.core.autotune.plan_cache import INDUCTOR, PlanCache
from plugins.core.compile import worker as compile_worker
from plugins.core.plan import Plan
from tests.core.compile.stand_ins import COMPILED, READY, new_host, run, stand_in
from tests.core.planned import Host, by_name

# -- what was learnt ----------------------------------------------------------------------------------------------


def test_a_second_run_compiles_from_its_first_update(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    monkeypatch.setattr(PlanCache, "has_code", lambda self, needed: True)
    run(host, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compile_worker, "command", lambda: pytest.fail("no second compile"))
    again = new_host(host.clock)
    tuner = run(again, cache_dir=tmp_path / "cache")
    assert again.losses == 10
    assert [(s.update, s.plan) for s in tuner.switches] == [(0, COMPILED)]


def test_code_that_went_away_is_compiled_again_beside_the_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    run(host, cache_dir=tmp_path / "cache")
    assert [s.update for s in run(new_host(host.clock), cache_dir=tmp_path / "cache").switches] == [5]


def test_other_code_is_not_the_plans(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, READY)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "code"))
    own, other = (tmp_path / "code" / "fxgraph" / "ab" / name / "graph" for name in ("own", "other"))
    own.parent.mkdir(parents=True)
    own.write_bytes(b"")
    for switched in (5, 0):
        tuner = run(new_host(host.clock), cache_dir=tmp_path / "cache")
        assert [(s.update, s.plan) for s in tuner.switches] == [(switched, COMPILED)]
    other.parent.mkdir()
    own.rename(other)
    assert [s.update for s in run(new_host(host.clock), cache_dir=tmp_path / "cache").switches] == [5]


def test_a_longer_run_asks_again_and_a_loser_is_not_asked_twice(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host.costs = by_name(host=1.0, compiled=2.0)
    stand_in(monkeypatch, READY)
    options = {"compile": "auto", "compile_backend": "eager", "cache_dir": tmp_path / "cache"}
    host.run(8, of=30, **options)
    second = new_host(host.clock)
    second.costs = host.costs
    assert "does not win" in run(second, cache_dir=tmp_path / "cache").background.findings.reason
    third = new_host(host.clock)
    assert "does not win" in run(third, cache_dir=tmp_path / "cache").background.findings.reason
    assert third.losses == 10


def test_past_the_budget_of_graphs_the_plan_is_eager_and_stays_so(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    tuner = run(host, tmp_path, cache_dir=tmp_path / "cache", recompile_budget=1)
    assert [s.plan for s in tuner.switches] == [COMPILED, Plan()]
    assert "recompile_budget" in host.open.report.compile.reason
    assert host.open.report.speed.plan == "host"
    again = new_host(host.clock)
    assert run(again, cache_dir=tmp_path / "cache", recompile_budget=1).switches == []


# -- the real one -------------------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_the_run_finds_the_workers_code_in_the_cache(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(INDUCTOR)
    cache = tmp_path / "cache"
    for updates, switched in ((8, 5), (3, 0)):
        counters.clear()
        torch._dynamo.reset()
        held = new_host(host.clock)
        tuner = run(held, tmp_path, updates, compile_backend="inductor", cache_dir=cache)
        assert [(s.update, s.plan) for s in tuner.switches] == [(switched, COMPILED)], tuner.background.findings
        assert counters["inductor"]["fxgraph_cache_hit"] > 0
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
        assert held.open.report.compile.cache == "warm"
        assert held.said == []
    assert os.environ[INDUCTOR] == str(cache / "inductor")
