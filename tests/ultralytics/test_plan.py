"""The speed plan in the real trainer: what is tried, switched and given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from ultralytics.utils.loss import v8DetectionLoss

from integrations.ultralytics.precision_layout import Layout
from plugins.core.autotune import cost_model
from plugins.core.autotune import timing as trial_module
from plugins.core.autotune.plan_file import PLAN_NAME
from plugins.core.plan import Plan, Timing
from tests.ultralytics.conftest import Run, Train, same
from tests.ultralytics.spy import NoSpy

BOTH = Plan("bf16", "channels_last")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds a step by plan, in place of what the machine would take; the trials themselves are real."""
    wanted = {"host": 1.0, BOTH.name: 0.5, "channels_last": 0.7, "bf16": 0.8}
    timed = trial_module.time_steps

    def time_steps(trial: Any, plan: Plan, *given: Any, **named: Any) -> Timing | None:
        timing = timed(trial, plan, *given, **named)
        if timing is not None:
            timing.seconds = [wanted[plan.name]] * len(timing.seconds)
        return timing

    monkeypatch.setattr(trial_module, "time_steps", time_steps)
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    monkeypatch.setattr(cost_model, "affordable", lambda candidates, *_: list(candidates))
    monkeypatch.setattr(cost_model, "HOPELESS", float("inf"))
    return wanted


def accel(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "plan": "auto",
        "precision": "auto",
        "accumulate": 1,
        "cache_dir": folder / "cache",
        "compile": "off",
        **options,
    }


def channels_last(run: Run) -> bool:
    weight = next(p for p in run.trainer.model.parameters() if p.dim() == 4 and min(p.shape) > 1)
    return bool(weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous())


def test_a_run_with_the_plan_is_the_run_with_its_file(train: Train, tmp_path: Path, seconds: dict[str, float]) -> None:
    measured = train(accel=accel(tmp_path), images=24, epochs=2, name="measured")
    speed = measured.report["speed"]
    assert speed["plan"] == BOTH.name
    assert [c["plan"] for c in speed["candidates"]] == ["host", BOTH.name, "channels_last", "bf16"]
    assert speed["switches"] == [{"update": 4, "plan": BOTH.name}]
    assert channels_last(measured)
    file = measured.folder / PLAN_NAME
    given = train(accel=accel(tmp_path / "other", plan=file), images=24, epochs=2, name="given")
    assert given.report["speed"]["candidates"] == []
    assert given.report["speed"]["switches"] == speed["switches"]
    assert same(given.weights, measured.weights)
    assert same(given.average, measured.average)
    assert given.spy.norms == measured.spy.norms
    assert json.loads((given.folder / PLAN_NAME).read_text()) == json.loads(file.read_text())


def test_plans_that_lose_leave_the_run_as_it_was(train: Train, tmp_path: Path, seconds: dict[str, float]) -> None:
    seconds.update({name: 2.0 for name in seconds if name != "host"})
    tried = train(accel=accel(tmp_path), images=24, name="tried")
    assert len(tried.report["speed"]["candidates"]) == 4
    assert tried.report["speed"]["switches"] == []
    plain = train(accel=accel(tmp_path, plan="off", precision="host", memory_format="host"), images=24, name="plain")
    assert same(tried.weights, plain.weights)
    assert same(tried.average, plain.average)
    strides = [[p.stride() for p in run.trainer.model.parameters()] for run in (tried, plain)]
    assert strides[0] == strides[1]


def test_a_second_run_starts_with_what_the_first_learnt(
    train: Train, tmp_path: Path, seconds: dict[str, float]
) -> None:
    first = train(accel=accel(tmp_path), images=24, name="first")
    second = train(accel=accel(tmp_path), images=24, name="second")
    assert first.report["speed"]["switches"] == [{"update": 4, "plan": BOTH.name}]
    assert second.report["speed"]["switches"] == [{"update": 0, "plan": BOTH.name}]
    assert second.report["speed"]["candidates"] == []


def test_plan_off_takes_the_precision_that_the_device_has(train: Train, tmp_path: Path, seconds: Any) -> None:
    run = train(accel=accel(tmp_path, plan="off"))
    speed = run.report["speed"]
    assert (speed["candidates"], speed["switches"]) == ([], [])
    assert speed["precision"] in ("bf16", "fp32")
    assert not channels_last(run)


def test_channels_last_by_the_settings(train: Train, tmp_path: Path) -> None:
    run = train(accel=accel(tmp_path, precision="host", memory_format="channels_last"))
    assert channels_last(run)
    assert run.report["speed"]["memory_format"] == "channels_last"
    assert run.report["speed"]["candidates"] == []


def test_a_saved_checkpoint_of_a_switched_run_is_the_hosts_own(
    train: Train, tmp_path: Path, seconds: dict[str, float]
) -> None:
    run = train(accel=accel(tmp_path), images=24)
    kept = torch.load(run.folder / "weights" / "last.pt", weights_only=False)
    model = kept["model"] or kept["ema"]
    assert "loss" not in vars(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_the_bare_model_travels_to_another_process_without_its_trainer(train: Train, tmp_path: Path) -> None:
    sizes: list[int] = []

    def pack(trainer: Any) -> None:
        layout: Layout = trainer.accel.layout
        patched = vars(trainer.model)["loss"]
        with layout.bare():
            assert "loss" not in vars(trainer.model)
            sizes.append(len(cloudpickle.dumps(trainer.model)))
        assert vars(trainer.model)["loss"] is patched
        assert trainer.model.criterion is not None

    run = train(accel=accel(tmp_path), callbacks={"on_train_start": pack})
    weights = sum(p.numel() * p.element_size() for p in run.trainer.model.parameters())
    assert 0 < sizes[0] < 4 * weights + 1_000_000


class Counted(v8DetectionLoss):
    asked = 0

    def loss(self, preds: Any, batch: Any) -> Any:
        Counted.asked += 1
        return super().loss(preds, batch)


def test_a_loss_of_the_user_is_called_as_often_as_by_the_host(
    train: Train, tmp_path: Path, seconds: dict[str, float]
) -> None:
    """Where a callback has put something around the host's, plans are tried on the host's alone."""
    called: list[int] = []

    def wrap(trainer: Any) -> None:
        through = trainer.model.loss
        trainer.model.loss = lambda batch, preds=None: (called.append(1), through(batch, preds))[1]

    def own(trainer: Any) -> None:
        trainer.model.criterion = Counted(trainer.model)

    options = accel(tmp_path)
    wrapped = train(accel=options, images=24, epochs=2, callbacks={"on_train_start": wrap}, spy=NoSpy())
    assert len(wrapped.report["speed"]["candidates"]) == 4
    assert len(called) == 12
    theirs = train(accel=options, images=24, epochs=2, callbacks={"on_train_start": own}, spy=NoSpy(), name="own")
    assert theirs.report["speed"]["candidates"] == []
    assert Counted.asked == 12
