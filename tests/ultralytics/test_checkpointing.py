"""Checkpoints: the host's own, whole at every instant, and resumed bit for bit."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from ultralytics import YOLO
from ultralytics.nn.tasks import DetectionModel

from integrations.ultralytics import checkpointing
from plugins.core import checkpoint
from plugins.core.checkpoint import atomic_file
from tests.ultralytics.conftest import ROOT, Run, Train, same, tensors, without_plug

# -- resume ------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for a kill: raised after a save, nothing of the host's end is reached."""


def stop_after(epoch: int) -> dict[str, Callable[[Any], None]]:
    def stop(trainer: Any) -> None:
        if trainer.epoch == epoch:
            raise Killed

    return {"on_fit_epoch_end": stop}


def everything(run: Run) -> dict[str, Any]:
    trainer = run.trainer
    _, numbers, gauss = random.getstate()
    return {
        **{f"live.{n}": t for n, t in tensors(trainer.model).items()},
        **{f"ema.{n}": t for n, t in tensors(trainer.ema.ema).items()},
        **{f"optimizer.{n}": t for n, t in _flat(trainer.optimizer.state_dict()).items()},
        "updates": torch.tensor(trainer.ema.updates),
        "schedule": torch.tensor([trainer.scheduler.last_epoch, *trainer.scheduler.get_last_lr()]),
        "python": torch.tensor(numbers),
        "gauss": torch.tensor(gauss or 0.0),
        "numpy": torch.from_numpy(np.random.get_state()[1].astype("int64")),  # type: ignore[index,union-attr]
        "torch": torch.get_rng_state(),
    }


def _flat(value: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(value, dict):
        return {k: t for key, v in value.items() for k, t in _flat(v, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return _flat(dict(enumerate(value)), name)
    if isinstance(value, Tensor):
        return {name: value.clone()}
    return {name: torch.tensor(value)} if isinstance(value, (int, float)) else {}


AUGMENTED: dict[str, Any] = {
    "mosaic": 1.0,
    "fliplr": 0.5,
    "hsv_h": 0.1,
    "scale": 0.3,
    "translate": 0.1,
    "epochs": 5,
    "close_mosaic": 2,
    "warmup_epochs": 2,
    "multi_scale": 0.5,
}
RESUMED = {
    # K = 4 over 5 micro-batches an epoch (images not divisible by the batch): every window but the fourth crosses
    "crossing windows": ({"accumulate": 4}, {"images": 18}),
    # images divisible by the batch: torch's sampler has a draw pending at the end of an epoch
    "divisible": ({"accumulate": 3}, {"images": 16}),
    "the host's windows": ({}, {"images": 16, "nbs": 12}),
    "momentum of BatchNorm, Adam": ({"accumulate": 2, "batchnorm": "momentum"}, {"images": 10, "optimizer": "AdamW"}),
}


def keep_copies(trainer: Any) -> None:
    """`on_fit_epoch_end`: what a kill at this instant would leave, in a folder of its own."""
    shutil.copytree(trainer.save_dir, trainer.save_dir.with_name(f"after{trainer.epoch}"), dirs_exist_ok=True)


def resume_from(epoch: int, train: Train) -> Run:
    folder = Path(f"after{epoch}").resolve()
    random.seed(99)
    torch.manual_seed(99)
    return train(accel={}, resume=folder / "weights" / "last.pt", save_dir=str(folder))


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_equals_straight_bit_for_bit(case: str, train: Train) -> None:
    accel, host = RESUMED[case]
    straight = train(accel=accel, callbacks={"on_fit_epoch_end": keep_copies}, **AUGMENTED, **host)
    right = everything(straight)
    # Before the mosaic closes, as it closes, after it closed; the settings come from the extra state.
    for epoch in (0, 2, 3):
        resumed = resume_from(epoch, train)
        assert resumed.trainer.start_epoch == epoch + 1
        ours = everything(resumed)
        off = [n for n in right if not torch.equal(ours[n], right[n])]
        assert not off, (epoch, off)
        facts = {n: v for n, v in resumed.report["window"].items() if n != "dropped_micro_batches"}
        assert facts == {n: v for n, v in straight.report["window"].items() if n in facts}


def test_end_to_end_heads_resume_with_their_loss_weights(train: Train) -> None:
    host = {**AUGMENTED, "images": 10, "callbacks": {"on_fit_epoch_end": keep_copies}}
    right = everything(train("end2end", accel={"accumulate": 2}, **host))
    ours = everything(resume_from(2, train))
    assert not [n for n in right if not torch.equal(ours[n], right[n])]


def test_settings_of_the_resume_win_over_the_saved_ones(train: Train) -> None:
    with pytest.raises(Killed):
        train(accel={"effective_batch": 8, "clip_norm": 5.0}, callbacks=stop_after(0), epochs=2, nbs=16)
    run = train(accel={"accumulate": 4}, resume=Path("run/weights/last.pt").resolve())
    assert run.report["config"]["accumulate"] == 4
    assert run.report["config"]["effective_batch"] == "host"
    assert run.report["config"]["clip_norm"] == 5.0
    assert run.spy.updates[0].decays[0] == pytest.approx(0.0005)  # 16 images an update, nbs 16


def test_a_host_s_checkpoint_resumes_with_the_plug_and_says_so(train: Train) -> None:
    with pytest.raises(Killed):
        train(callbacks=stop_after(0), epochs=2)
    run = train(accel={"accumulate": 2}, resume=Path("run/weights/last.pt").resolve())
    assert any("no extra state lies beside" in w for w in run.report["warnings"])
    assert len(run.spy.updates) == 2


def test_extra_state_of_another_checkpoint_is_not_used(train: Train) -> None:
    with pytest.raises(Killed):
        train(accel={"accumulate": 2}, callbacks=stop_after(0), epochs=2)
    last = Path("run/weights/last.pt").resolve()
    (extra,) = last.parent.glob("last.*.accel")
    torch.load(extra, weights_only=True)
    saved = torch.load(last, weights_only=False)
    torch.save(saved, last)  # the same content, other bytes
    saved["epoch"] = 0
    torch.save(saved, last)
    assert checkpoint.load_sidecar(last) is None
    run = train(accel={}, resume=last)
    assert any("no extra state lies beside" in w for w in run.report["warnings"])


ALONE = """
import sys
sys.modules["plugins"] = sys.modules["integrations"] = None
from ultralytics import YOLO
model = YOLO(sys.argv[1])
if sys.argv[2] == "resume":
    model.train(resume=True)
    print("epochs", model.trainer.start_epoch, model.trainer.epoch)
else:
    print("exported", model.export(format="onnx", imgsz=64, simplify=False))
"""


def test_resumes_loads_and_exports_without_the_plug(train: Train, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(accel={"accumulate": 2}, callbacks=stop_after(0), epochs=2, val=True)
    last = Path("run/weights/last.pt").resolve()
    saved = torch.load(last, weights_only=False)
    assert type(saved["ema"]) is DetectionModel
    assert not any("plugins" in str(v) or "accel" in str(v) for v in saved["train_args"].values())
    done = without_plug("-c", ALONE, str(last), "resume", cwd=tmp_path)
    assert "epochs 1 1" in done.stdout, done.stderr
    done = without_plug("-c", ALONE, str(last), "export", cwd=tmp_path)
    assert "exported" in done.stdout, done.stderr
    assert last.with_suffix(".onnx").is_file()


@pytest.mark.parametrize(("backend", "validate"), [("eager", "compiled"), ("aot_eager", "eager")])
def test_files_of_a_compiled_run_are_the_host_s(backend: str, validate: str, train: Train) -> None:
    run = train(
        accel={"compile": "on", "compile_backend": backend, "accumulate": 2, "validate": validate},
        epochs=2,
        save_period=1,
        val=True,
    )
    assert run.report["compile"]["decision"] == "whole"
    assert run.report["compile"]["graphs"] > 0
    folder = run.folder / "weights"
    assert {p.name for p in folder.iterdir()} == {"last.pt", "best.pt", "epoch0.pt", "epoch1.pt"}
    host = train(name="host", epochs=2, save_period=1, val=True).folder / "weights"
    for name in ("last.pt", "best.pt", "epoch0.pt", "epoch1.pt"):
        ours, theirs = (torch.load(f / name, weights_only=False) for f in (folder, host))
        assert ours.keys() == theirs.keys()
        a, b = (c["model"] or c["ema"] for c in (ours, theirs))
        assert type(a) is type(b) is DetectionModel
        assert a.state_dict().keys() == b.state_dict().keys()
        assert vars(a).keys() == vars(b).keys()
        assert (folder / name).stat().st_mode == (host / name).stat().st_mode
    assert YOLO(str(folder / "best.pt")).model.training is False


# -- killed, or out of space ---------------------------------------------------------------------------------------

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
