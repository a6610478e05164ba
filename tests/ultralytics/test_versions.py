"""The host's symbols: those that the plug needs are there, and the table lists what the source takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from integrations.ultralytics import versions
from integrations.ultralytics.versions import TABLE
from tests.symbols import named, taken

NEEDED = [symbol for symbol in TABLE if not symbol.without]
OURS = {"generator", "criterion", "assigner", "forward", "unscale_"}  # and of torch


@pytest.mark.parametrize("symbol", NEEDED, ids=[symbol.path for symbol in NEEDED])
def test_the_host_has_what_the_plug_cannot_do_without(symbol) -> None:
    assert symbol.here, f"Ultralytics lacks {symbol.path}, which the plug takes"


def test_the_table_lists_what_the_source_takes() -> None:
    assert set(taken("ultralytics", {"ultralytics"})) - named(TABLE) - OURS == set()


def test_a_symbol_that_may_be_missing_says_since_when_and_what_is_done() -> None:
    assert all(symbol.since and symbol.without for symbol in TABLE if symbol.since or symbol.without)


def test_an_older_host_s_warm_up_is_at_least_100_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(warmup_epochs=3.0, nbs=64), batch_size=12)
    monkeypatch.setattr(versions, "WARMUP", SimpleNamespace(here=False))
    assert versions.warmup_iterations(trainer, 10) == 100
    assert versions.warmup_iterations(trainer, 50) == 150
    assert versions.top_of_ramp(trainer, 5) == pytest.approx(64 / 12)
    trainer.args.warmup_epochs = 0
    assert versions.warmup_iterations(trainer, 10) == 0


@pytest.mark.parametrize("order", [["bias", "weight", "bn"], ["weight", "bn", "bias"]], ids=["8.3.100", "8.4.0"])
def test_an_older_host_s_groups_are_known_by_their_decay_and_order(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "GROUP_NAMES", SimpleNamespace(here=False))
    groups = [{"lr": 1.0, "weight_decay": 0.1 if name == "weight" else 0.0} for name in order]
    trainer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    assert [versions.decays(group, 0.2) for group in groups] == [name == "weight" for name in order]
    assert [versions.warms_up_as_bias(trainer, group) for group in groups] == [True, False, False]


@pytest.mark.parametrize(("name", "decays"), [("weight", True), ("muon", True), ("bias", False), ("bn", False)])
def test_groups_with_names_are_known_by_them(name: str, decays: bool) -> None:
    group = {"param_group": name, "weight_decay": 0.0}
    assert versions.decays(group, 0.1) == decays
    assert versions.warms_up_as_bias(SimpleNamespace(), group) == (name == "bias")


OWN: list[tuple[dict[str, float], bool]] = [({"weight_decay": 0.1}, True), ({"weight_decay": 0.05}, False), ({}, False)]


@pytest.mark.parametrize(("own", "decays"), OWN)
def test_groups_of_a_user_s_own_take_the_decay_over_or_have_theirs(
    own: dict[str, float], decays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "GROUP_NAMES", SimpleNamespace(here=True))
    assert versions.decays(own, 0.1) == decays
    assert not versions.warms_up_as_bias(SimpleNamespace(optimizer=SimpleNamespace(param_groups=[own])), own)


def test_a_model_without_a_wrapper_is_itself() -> None:
    model = nn.Linear(1, 1)
    assert versions.unwrap(model) is model
    assert not versions.distils(model)
