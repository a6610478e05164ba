"""The one resumable state of a run, and the states that earlier releases wrote."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core.autotune import cost_model
from plugins.core.autotune.plan_file import Switch
from plugins.core.checkpoint.rng_state import random_state, set_random_state
from plugins.core.plan import Plan
from plugins.core.session import Session
from plugins.loop import Accelerated
from tests.core.planned import Clock, Host, by_name
from tests.core.tiny import mlp, same, snapshot

BOTH = Plan("bf16", "channels_last")
SECONDS = {"bf16": 0.8, "channels_last": 0.7, "both": 0.5}
FIELDS = {
    "config", "model", "optimizer", "scaler", "average", "window", "gradients", "kept_statistics", "counts", "plan",
    "switches", "measured", "random", "beside_model", "beside_gradients", "rescue",
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    return Clock(monkeypatch)


def written_by_0_1(held: Session) -> dict[str, Any]:
    """As release 0.1 assembled it: every part by hand, and no switches."""
    update, window = held.update, held.window
    gradients = {n: p.grad.detach() for n, p in held.model.named_parameters() if p.grad is not None}
    names = ("micro_batches", "updates", "partial_windows", "skipped_updates", "dropped_micro_batches")
    return {
        "config": held.config.given(),
        "model": held.model.state_dict(),
        "optimizer": update.optimizer.state_dict(),
        "scaler": update.scaler.state_dict() if update.scaler is not None else {},
        "average": update.average.state_dict() if update.average is not None else {},
        "window": {
            "micro_batches": window.micro_batches,
            "samples": window.samples,
            "expected": window.expected,
            "totals": {g: [t.targets, t.images, t.scaled, t.floor] for g, t in window._totals.items()},
            "power": dict(window._power),
            "last": dict(window._last),
        },
        "gradients": {} if window.empty else gradients,
        "kept_statistics": [] if window.empty else list(held.statistics._kept),
        "counts": {name: getattr(held.report.window, name) for name in names},
        "plan": held.tuner.plan.as_dict(),
        "measured": held.tuner.state == "done",
        "random": random_state(),
    }


@pytest.mark.parametrize("written", [written_by_0_1, Session.state_dict], ids=["0.1", "now"])
@pytest.mark.parametrize("at", [7, 8])
def test_a_run_resumed_from_a_state_equals_the_straight_one(clock: Clock, written: Any, at: int) -> None:
    """Saved in the middle of a window, and at its end."""
    straight, first, second = (Host(clock, by_name(**SECONDS)) for _ in range(3))
    straight.run(12, size=2, end=False)
    state = copy.deepcopy(written(first.run(at, size=2, end=False)))
    again = second.session(size=2)
    again.load_state_dict(state)
    set_random_state(state["random"])
    second.run(12, first=at, end=False)
    assert again.tuner.plan == straight.open.tuner.plan == BOTH
    assert same(snapshot(second.model), snapshot(straight.model))
    assert same(again.update.optimizer.state_dict(), straight.open.update.optimizer.state_dict())
    assert again.recorder.state_dict() == straight.open.recorder.state_dict()


def test_a_state_keeps_the_switches_of_the_run_before(clock: Clock) -> None:
    first, second = (Host(clock, by_name(**SECONDS)) for _ in range(2))
    state = copy.deepcopy(first.run(6, end=False).state_dict())
    again = second.session()
    again.load_state_dict(state)
    second.run(8, first=6)
    assert again.tuner.switches == first.open.tuner.switches == [Switch(4, BOTH)]


def test_every_field_is_in_the_state_and_a_host_leaves_out_its_own(clock: Clock) -> None:
    held = Host(clock, by_name()).session()
    state = held.run_state()
    assert set(state.state_dict()) == FIELDS
    assert set(state.without("model", "optimizer").state_dict()) == FIELDS - {"model", "optimizer"}
    assert set(state.without("gradients", "plan").state_dict()) == FIELDS - {
        "gradients", "kept_statistics", "plan", "switches", "measured",
    }  # fmt: skip
    assert set(state.state_dict()) == FIELDS
    with pytest.raises(KeyError):
        state.without("weights")


def test_a_field_that_is_left_out_is_neither_read_nor_put_back(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer of the host's own may gather over ranks, or refuse."""
    first, second = (Host(clock, by_name()) for _ in range(2))
    whole = copy.deepcopy(first.run(3, end=False).state_dict())
    again = second.session()
    weights = snapshot(second.model)
    monkeypatch.setattr(second.optimizer, "state_dict", lambda: pytest.fail("read"))
    monkeypatch.setattr(second.optimizer, "load_state_dict", lambda state: pytest.fail("put back"))
    less = again.run_state().without("model", "optimizer")
    less.state_dict()
    less.load_state_dict(whole)
    assert same(snapshot(second.model), weights)
    assert again.updates == 3


def test_a_resumed_window_is_of_the_run_s_own_size(clock: Clock) -> None:
    first, second = (Host(clock, by_name()) for _ in range(2))
    state = copy.deepcopy(first.run(4, size=4, end=False).state_dict())
    again = second.session(size=2)
    again.load_state_dict(state)
    assert again.window.expected == 2


def test_a_file_of_a_loop_of_0_1_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 3, generator=draw), torch.randn(4, 2, generator=draw)) for _ in range(7)]

    def loop() -> Accelerated:
        model = mlp(norm=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Accelerated(model, optimizer, accumulate=2, ema=0.9, compile="off", say=lambda line: None)

    def step(accel: Accelerated, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with accel.forward(batch[0]) as x:
            loss = torch.nn.functional.mse_loss(accel.model(x), batch[1])
        accel.backward(loss, weight=len(x))

    straight, second, file = loop(), loop(), tmp_path / "old.pt"
    for done, batch in enumerate(data):
        if done == 3:
            extra = {"kinds": {"optimizer": "AdamW", "schedule": "none"}, "extra": {"epoch": 1}}
            with straight._step.gradients_inside():  # 0.1 left them in the parameters
                torch.save({"accel": 1, **written_by_0_1(straight.session), **extra}, file)
        step(straight, batch)
    assert second.resume(file) == {"epoch": 1}
    for batch in data[3:]:
        step(second, batch)
    assert same(snapshot(second.model), snapshot(straight.model))
    assert same(second.weights(), straight.weights())
    assert second.updates == straight.updates == 3
