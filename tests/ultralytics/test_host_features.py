"""The host's own features beside the plug: plots, callbacks, time, batches that do not fit, several trainings."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ultralytics import YOLO
from ultralytics.utils.callbacks.base import default_callbacks

from integrations.ultralytics.out_of_memory import Rescuing
from plugins import yolo
from plugins.yolo import attach
from tests.ultralytics.conftest import Train
from tests.ultralytics.spy import Spy


def test_reports_csv_plots_and_the_user_s_own_callbacks(train: Train) -> None:
    events: list[str] = []
    note = {e: partial(_note, events, e) for e in ("on_train_start", "on_model_save", "on_train_end", "teardown")}
    run = train(accel={"accumulate": 2}, epochs=2, plots=True, val=True, callbacks=note)
    assert events == ["on_train_start", "on_model_save", "on_model_save", "on_train_end", "teardown"]
    names = {p.name for p in run.folder.iterdir()}
    assert {"accel_report.json", "accel_report.html", "results.csv", "results.png", "labels.jpg"} <= names
    assert "train_batch0.jpg" in names
    with (run.folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[0]["train/box_loss"]) > 0
    report = run.report
    assert (report["schema"], report["host"]) == (1, "ultralytics")
    assert report["versions"]["ultralytics"]
    assert report["config"]["accumulate"] == 2
    assert report["ema"]["updates"] == 4
    assert report["checkpoints"] == [str(run.folder / "weights" / n) for n in ("last.pt", "best.pt")]
    assert report["gradients"]["without_gradient"] == []


def _note(events: list[str], event: str, _: Any) -> None:
    events.append(event)


def test_the_losses_shown_are_the_host_s(train: Train) -> None:
    """Weights are put on the gradient, never on what the bar, the csv and the loggers show."""
    accel = {"accumulate": 4, "batchnorm": "freeze"}
    a = train(accel=accel, lr0=0.0, weight_decay=0.0, name="a")
    b = train(accel={**accel, "accumulate": 1}, lr0=0.0, weight_decay=0.0, name="b")
    assert {k: float(v) for k, v in a.trainer.tloss.items()} == {k: float(v) for k, v in b.trainer.tloss.items()}


def test_a_report_lies_there_while_the_run_goes_on(train: Train) -> None:
    found: list[bool] = []
    train(
        accel={"accumulate": 2},
        epochs=2,
        callbacks={"on_fit_epoch_end": lambda t: found.append((t.save_dir / "accel_report.json").is_file())},
    )
    assert all(found)


@pytest.mark.parametrize(
    "host",
    [
        {"freeze": 3},
        {"patience": 1, "epochs": 3, "val": True, "lr0": 0.0},
        {"amp": False},
        {"amp": True},
        {"save_period": 1, "epochs": 2},
        {"single_cls": True, "val": True},
        {"rect": True},
        {"cache": "ram", "mosaic": 1.0},
        {"cos_lr": True, "optimizer": "auto"},
        {"optimizer": "MuSGD"},
        {"fraction": 0.5},
        {"cls_pw": 0.5},
        {"multi_scale": 0.5, "mixup": 0.5, "mosaic": 1.0},
        {"nbs": 1},
        {"save": False},
    ],
    ids=lambda host: ",".join(host),
)
def test_the_host_s_settings_work_with_the_plug(host: dict[str, Any], train: Train) -> None:
    run = train(accel={"accumulate": 2, "clip_norm": "off", "batchnorm": "freeze"}, spy=Spy(heavy=True), **host)
    assert run.report["window"]["updates"] == len(run.spy.updates) > 0
    assert all(t.isfinite().all() for t in run.weights.values())
    assert (run.folder / "weights" / "last.pt").is_file()
    for update in run.spy.updates:
        assert update.off() <= 1e-6
    if "freeze" in host:
        frozen = {n for n, p in run.trainer.model.named_parameters() if not p.requires_grad}
        assert any(n.startswith("model.2.") for n in frozen)
        assert not frozen & set(run.spy.updates[0].gradients)
        assert run.report["gradients"]["without_gradient"] == []
    if "save_period" in host:
        assert (run.folder / "weights" / "epoch1.pt").is_file()
    if "patience" in host:
        assert run.trainer.epoch < 2 or run.trainer.stop


def test_time_ends_inside_an_epoch_and_the_tail_is_flushed(train: Train) -> None:
    def hurry(trainer: Any) -> None:
        if len(spy.sizes) == 2:  # the next is in the middle of a window and of an epoch
            trainer.train_time_start -= 3600

    spy = Spy(heavy=True)
    run = train(
        accel={"accumulate": 2, "batchnorm": "freeze", "clip_norm": "off"},
        time=1.0,
        spy=spy,
        callbacks={"on_train_batch_start": hurry},
    )
    windows = [len(u.batches) for u in run.spy.updates]
    assert windows[0] == 2
    assert sum(windows) == len(spy.sizes)
    assert len(spy.sizes) % 2 == 1
    assert windows[-1] == 1
    assert run.report["window"]["dropped_micro_batches"] == 0
    assert all(u.off() <= 1e-6 for u in run.spy.updates)


def test_a_stop_from_a_callback_flushes_too(train: Train) -> None:
    run = train(accel={"accumulate": 3}, callbacks={"on_train_batch_end": lambda t: setattr(t, "stop", True)})
    assert run.report["window"]["updates"] == 1
    assert run.report["window"]["micro_batches"] == 1


@pytest.mark.parametrize(
    ("accel", "accumulate", "effective"),
    [({"effective_batch": 8}, 4, 8), ({"accumulate": 2}, 2, 4), ({}, 4, 8)],
    ids=["effective_batch", "accumulate", "host"],
)
def test_out_of_memory_halves_the_batch(
    accel: dict[str, Any], accumulate: int, effective: int, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own way, in its first epoch, where a batch cannot be divided."""
    monkeypatch.setattr(Rescuing, "_why", lambda self, batch: "planted")
    failed: list[int] = []

    def run_out(trainer: Any) -> None:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if not failed and module.training and len(spy.sizes) == 2 and not spy.updates:
                failed.append(len(inputs[0]))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

        trainer.model.model[0].register_forward_pre_hook(hook)

    spy = Spy(heavy=True)
    run = train(
        accel={"batchnorm": "freeze", "clip_norm": "off", **accel},
        nbs=8 if not accel else 64,
        spy=spy,
        callbacks={"on_pretrain_routine_end": run_out},
    )
    assert failed == [4]
    facts = run.report["window"]
    assert (facts["accumulate"], facts["micro_batch"], facts["effective_batch"]) == (accumulate, 2, effective)
    sizes = [sum(len(b["img"]) for b in u.batches[-accumulate:]) for u in run.spy.updates]
    assert sizes == [effective] * (16 // effective)
    assert facts["dropped_micro_batches"] >= 1
    for update in run.spy.updates[1:]:
        assert update.off() <= 1e-6


def test_training_twice_with_one_attached_model(
    data: Callable[..., Path], models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = attach(YOLO(str(models("detect"))), accumulate=2, plan="off")
    seen: list[Any] = []
    model.add_callback("on_train_start", lambda t: seen.append((t.accel, t.accel.size)))
    for name in ("a", "b"):
        model.train(
            data=str(data()),
            epochs=1,
            batch=4,
            imgsz=64,
            plots=False,
            val=False,
            workers=0,
            project=str(tmp_path),
            name=name,
        )
        assert (tmp_path / name / "accel_report.json").is_file()
        assert model.trainer.accel is None
    assert [size for _, size in seen] == [2, 2]
    assert seen[0][0] is not seen[1][0]
    assert len(model.callbacks["on_train_epoch_start"]) == len(default_callbacks["on_train_epoch_start"])


def test_start_twice_holds_once() -> None:
    trainer = SimpleNamespace(accel="held")
    yolo.start(trainer)
    assert trainer.accel == "held"
    yolo.finish(SimpleNamespace())


def test_a_report_that_cannot_be_written_costs_nothing_else(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plugins.core.telemetry.report.Report.write", full)
    run = train(accel={"accumulate": 2})
    assert (run.folder / "weights" / "last.pt").is_file()
    assert run.trainer.accel is None


def test_the_settings_file_and_the_environment(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accel.yaml").write_text("accumulate: 4\nclip_norm: 0.1\n")
    monkeypatch.setenv("ACCEL_CLIP_NORM", "0.2")
    run = train(accel={})
    assert run.report["config"]["accumulate"] == 4
    assert run.report["config"]["clip_norm"] == 0.2
