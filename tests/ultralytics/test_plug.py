"""`plugins.yolo` as a user meets it: attach, workers, and bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ultralytics import YOLO
from ultralytics.utils.callbacks.base import default_callbacks
from ultralytics.utils.dist import ddp_cleanup, generate_ddp_file

from plugins import AccelConfig, yolo
from plugins.errors import AccelError
from plugins.yolo import attach
from tests.ultralytics.conftest import PLAIN, ROOT, Train, same

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
