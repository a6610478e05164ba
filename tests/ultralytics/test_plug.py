"""`plugins.yolo` as a user meets it: attach, workers, the host's own features beside it, and bad input."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ultralytics import YOLO
from ultralytics.utils.callbacks.base import default_callbacks
from ultralytics.utils.dist import ddp_cleanup, generate_ddp_file

from integrations.ultralytics.out_of_memory import Rescuing
from plugins import AccelConfig, yolo
from plugins.errors import AccelError
from plugins.yolo import attach
from tests.ultralytics.conftest import PLAIN, ROOT, Spy, Train, same

# -- attach, callbacks, check --------------------------------------------------------------------------------------


def test_callbacks_are_a_dict_of_the_host_s_events() -> None:
    assert set(yolo.callbacks) <= set(default_callbacks)
    assert all(callable(f) for f in yolo.callbacks.values())


def test_attaching_again_replaces_the_settings_and_keeps_other_callbacks(models: Callable[[str], Path]) -> None:
    model = YOLO(str(models("detect")))
    model.add_callback("teardown", print)
    assert attach(model, accumulate=2) is model
    attach(model, accumulate=4)
    ours = [f for f in model.callbacks["on_pretrain_routine_end"] if getattr(f, "func", None) is yolo.start]
    assert [f.keywords["options"] for f in ours] == [{"accumulate": 4}]
    assert model.callbacks["teardown"].count(yolo.finish) == 1
    assert print in model.callbacks["teardown"]
    assert yolo.start not in YOLO(str(models("detect"))).callbacks["on_pretrain_routine_end"]


@pytest.mark.parametrize(
    ("options", "host", "words"),
    [
        ({"acumulate": 4}, {}, "acumulate=4: unknown field; did you mean accumulate?"),
        ({"accumulate": 0}, {}, "accumulate=0: allowed are"),
        ({"accumulate": 2, "effective_batch": 8}, {}, "accumulate=2 and effective_batch=8 contradict"),
        ({"effective_batch": 10}, {"batch": 4}, "effective_batch=10: not a multiple of batch=4; allowed are 4, 8"),
        ({"effective_batch": 10}, {}, "effective_batch=10: not a multiple of batch=16"),
        ({"compile": "on"}, {"compile": True}, "compile=True: the host's own compile"),
        ({"batchnorm": "precise"}, {}, "batchnorm=precise: not for Ultralytics"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], host: dict[str, Any], words: str) -> None:
    with pytest.raises(AccelError, match=r"^[^\n]+$") as error:
        yolo.configure(options, host)
    assert words in str(error.value)


@pytest.mark.parametrize("host", [None, {"resume": True}, {"cfg": "mine.yaml"}, {"batch": -1}, {"batch": 0.7}])
def test_a_batch_that_is_not_known_yet_is_checked_later(host: dict[str, Any] | None) -> None:
    yolo.configure({"effective_batch": 10}, host)


def test_an_effective_batch_that_does_not_fit_in_python(train: Train) -> None:
    with pytest.raises(AccelError, match=r"effective_batch=10: not a multiple of batch=4; allowed are 4, 8, \.\.\."):
        train(accel={"effective_batch": 10})


def test_the_host_s_own_compile_is_refused_in_python(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultralytics.engine.trainer.attempt_compile", lambda model, **_: model)
    with pytest.raises(AccelError, match="compile=True: the host's own compile and the plug exclude each other"):
        train(accel={}, compile=True)


# -- workers (16838) ------------------------------------------------------------------------------------------------

WORKER = """
import sys
from types import SimpleNamespace
from ultralytics.utils import DEFAULT_CFG_DICT, RANK
from ultralytics.utils.patches import torch_load
import ultralytics.engine.trainer as engine

assert RANK == 1
state = torch_load(sys.argv[1], map_location="cpu")
events = []
cls = state["trainer"]
run_callbacks = cls.run_callbacks
cls.run_callbacks = lambda self, event: (events.append(event), run_callbacks(self, event))[1]
cls._setup_ddp = lambda self: None
trainer = cls(cfg={**DEFAULT_CFG_DICT, "save_dir": ""}, overrides=state["args"], _callbacks=state["callbacks"])
trainer.model = state["model"]
trainer._setup_train()
print("events", sorted(set(events)))
print("held", type(trainer.accel).__name__, trainer.accel.size, trainer.accel.session.config.clip_norm)
print("patched", "optimizer_step" in vars(trainer))
trainer.run_callbacks("teardown")
print("undone", "optimizer_step" not in vars(trainer), trainer.accel)
print("report", sorted(p.name for p in trainer.save_dir.glob("accel*")))
"""


def test_16838_a_worker_of_rank_1_holds_its_trainer_with_the_options(
    data: Callable[..., Path], models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own state file, loaded as its worker does. `on_pretrain_routine_start` does not fire there."""
    monkeypatch.chdir(tmp_path)
    model = attach(YOLO(str(models("detect"))), accumulate=4, clip_norm=0.5)
    from ultralytics.models.yolo.detect import DetectionTrainer

    arguments = {
        "model": str(models("detect")),
        "data": str(data()),
        "batch": 4,
        "imgsz": 64,
        "epochs": 1,
        "plots": False,
        "workers": 0,
        "project": str(tmp_path),
        "name": "worker",
        "device": "cpu",
        **PLAIN,
    }
    trainer = DetectionTrainer(overrides=arguments, _callbacks=model.callbacks)
    trainer.model = trainer.get_model(cfg=model.model.yaml)
    file = generate_ddp_file(trainer)
    try:
        environment = {
            **os.environ,
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "-1",
            "PYTHONPATH": str(ROOT),
            "YOLO_OFFLINE": "1",
        }
        state = str(Path(file).with_suffix(".pt"))
        done = subprocess.run(
            [sys.executable, "-c", WORKER, state],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        ddp_cleanup(trainer, file)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert lines.get("events") == "['on_pretrain_routine_end']", done.stderr
    assert lines["held"] == "Adapter 4 0.5"
    assert lines["patched"] == "True"
    assert lines["undone"] == "True None"
    assert lines["report"] == "[]"  # rank 0 writes it


# -- the host's own features ----------------------------------------------------------------------------------------


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


# -- bad input through the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["accel.acumulate=4"], "acumulate=4: unknown field; did you mean accumulate?"),
        (["accel.accumulate=0"], "accumulate=0: allowed are host, or an integer of at least 1"),
        (["accel.accumulate=2", "accel.effective_batch=8"], "contradict"),
        (["accel.effective_batch=10", "batch=4"], "effective_batch=10: not a multiple of batch=4"),
        (["compile=True", "accel.compile=on"], "compile=True: the host's own compile and the plug exclude each other"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(fields: list[str], words: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "YOLO_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "plugins.yolo", "train", "model=yolov8n.yaml", "data=coco8.yaml", *fields],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_non_finite_stop_is_one_line_in_the_command(
    data: Callable[..., Path], models: Callable[[str], Path], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def spoil(trainer):\n"
        "    next(trainer.model.parameters()).register_hook(lambda g: g * float('nan'))\n"
        "callbacks = {'on_train_start': spoil}\n"
    )
    arguments = [f"model={models('detect')}", f"data={data()}", "epochs=1", "batch=4", "imgsz=64", "plots=False"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "YOLO_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "plugins.yolo", "train", *arguments, f"project={tmp_path}", "name=run"),
            *("callbacks=mine", "accel.nonfinite=stop", "accel.accumulate=2"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("accel-plugins: gradient norm is nan and nonfinite=stop")
    assert (tmp_path / "run" / "accel_report.json").is_file()


def test_the_plug_leaves_a_plain_run_alone(train: Train) -> None:
    """Importing the plug changes nothing: a run without it is the host's, bit for bit, before and after."""
    a, b = train(name="a"), train(name="b")
    assert same(a.weights, b.weights)
    assert not hasattr(a.trainer, "accel")
    assert "optimizer_step" not in vars(a.trainer)


@pytest.mark.parametrize("model", [None, "yolov8n.pt", 3])
def test_attach_to_what_is_no_model(model):
    with pytest.raises(AccelError, match="is no Ultralytics model"):
        yolo.attach(model)


def test_a_distilled_model_is_refused_before_anything_is_written():
    with pytest.raises(AccelError, match="distill_model: not served"):
        yolo.check(AccelConfig(), {"distill_model": "yolov8s.pt"})
