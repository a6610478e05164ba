"""Checkpoints are whole at every instant: a kill, a death at any system call, a full disk."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.ultralytics import checkpointing
from plugins.core import checkpoint
from plugins.core.checkpoint import atomic_file
from tests.ultralytics.conftest import ROOT, Train, same

SAVER = """
import sys
from pathlib import Path
import ultralytics.engine.trainer as host
from plugins.yolo import attach
from ultralytics import YOLO

def repeat(trainer):
    trainer.save_model()
    print("go", flush=True)
    for epoch in range(10**6):
        trainer.ema.updates = epoch
        trainer.save_model()

model = attach(YOLO(sys.argv[1]), accumulate=3)
model.add_callback("on_fit_epoch_end", repeat)
model.train(data=sys.argv[2], epochs=3, batch=4, imgsz=64, plots=False, val=False, workers=0, project=sys.argv[3],
            name="run", exist_ok=True, save_period=1)
"""


def test_killed_at_random_instants_while_saving(
    data: Callable[..., Path], models: Callable[[str], Path], tmp_path: Path
) -> None:
    generator = random.Random(0)
    last = tmp_path / "run" / "weights" / "last.pt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "YOLO_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(models("detect")), str(data()), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=tmp_path,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("go"):
                break
        else:
            pytest.fail("the run never saved")
        time.sleep(generator.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for file in (last, last.with_name("best.pt"), last.with_name("epoch0.pt")):
            assert torch.load(file, weights_only=False)["ema"] is not None
        extra = checkpoint.load_sidecar(last)
        assert extra is not None  # whatever was there, what belongs to this very file is there
        assert extra["average"]["updates"] == torch.load(last, weights_only=False)["updates"]
    checkpoint.sweep(last.parent)
    assert not list(last.parent.glob(".*.tmp"))


class Died(BaseException):
    """Not an error that anything would handle, as a kill is not."""


def test_a_death_at_any_system_call_of_a_save(train: Train) -> None:
    """Every call of a save in turn is the last one that the process makes; files are not tidied up, as after a kill."""
    instants: dict[str, int] = {}

    def die_at(trainer: Any, owner: Any, name: str, at: int) -> bool:
        """Save until the call number `at` of `owner.name`; True where there is such a call."""
        through, count = getattr(owner, name), iter(range(10**6))

        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                raise Died
            return through(*args, **kwargs)

        unlink = Path.unlink

        def not_tidied(path: Path, **kwargs: Any) -> None:
            if path.suffix != ".tmp":
                unlink(path, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", not_tidied)
            patch.setattr(owner, name, counted)
            try:
                trainer.save_model()
            except Died:
                return True
        return False

    def save_and_die(trainer: Any) -> None:
        for owner, name in ((os, "fdopen"), (os, "fsync"), (Path, "replace"), (Path, "chmod")):
            at = 0
            while True:
                trainer.ema.updates += 1
                died = die_at(trainer, owner, name, at)
                saved = torch.load(trainer.last, weights_only=False)
                extra = checkpoint.load_sidecar(trainer.last)
                assert extra is not None
                assert extra["average"]["updates"] == saved["updates"]
                if not died:
                    assert saved["updates"] == trainer.ema.updates
                    break
                at += 1
            instants[name] = at

    train(accel={"accumulate": 3}, callbacks={"on_model_save": save_and_die}, save_period=1)
    assert min(instants.values()) >= 4  # extra state, last, best, epoch0


def test_disk_full_costs_one_checkpoint_and_not_the_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []
    fsync = os.fsync

    def arm(trainer: Any) -> None:
        if trainer.epoch == 1:
            kept.append(trainer.last.read_bytes())

            def full(handle: int) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(atomic_file.os, "fsync", full)

    def disarm(trainer: Any) -> None:
        monkeypatch.setattr(atomic_file.os, "fsync", fsync)
        if trainer.epoch == 1:
            assert trainer.last.read_bytes() == kept[0]
            assert not list(trainer.wdir.glob(".*.tmp"))

    run = train(
        accel={"accumulate": 2},
        epochs=3,
        callbacks={"on_train_epoch_end": arm, "on_fit_epoch_end": disarm},
    )
    saved = torch.load(run.folder / "weights" / "last.pt", weights_only=False)
    assert len(saved["train_results"]["epoch"]) == 3  # a later save went through
    warnings = [w for w in run.report["warnings"] if "not written" in w]
    assert any("last.pt" in w and "No space left" in w for w in warnings)
    straight = train(accel={"accumulate": 2}, epochs=3, name="straight")
    assert same(run.weights, straight.weights)


def test_disk_full_while_stripping_keeps_the_whole_checkpoint(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def arm(trainer: Any) -> None:
        if trainer.epoch + 1 == trainer.epochs:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(checkpointing.shutil, "copyfile", full)

    run = train(accel={"accumulate": 2}, epochs=2, callbacks={"on_fit_epoch_end": arm})
    saved = torch.load(run.folder / "weights" / "last.pt", weights_only=False)
    assert saved["optimizer"] is not None  # not stripped, and whole
    assert any("last.pt" in w and "No space left" in w for w in run.report["warnings"])
    assert run.trainer.metrics  # the last validation went through


def test_stripping_is_the_host_s(train: Train) -> None:
    ours = train(accel={}, epochs=2, nbs=4).folder / "weights"
    host = train(name="host", epochs=2, nbs=4).folder / "weights"
    for name in ("last.pt", "best.pt"):
        a, b = (torch.load(f / name, weights_only=False) for f in (ours, host))
        assert a.keys() == b.keys()
        assert a["optimizer"] is b["optimizer"] is None
        assert a["epoch"] == b["epoch"] == -1
        assert same(a["model"].state_dict(), b["model"].state_dict())
    assert {p.name for p in ours.iterdir()} == {"last.pt", "best.pt"}  # no extra state is left behind
