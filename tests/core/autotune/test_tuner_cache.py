from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugins.core.autotune import cost_model
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.plan import Plan
from tests.core.planned import BOTH_WIN, UPDATES, Clock, Host, by_name


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
