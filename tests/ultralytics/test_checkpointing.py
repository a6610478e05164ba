"""Checkpoints: the host's own, and resumed bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from ultralytics import YOLO
from ultralytics.nn.tasks import DetectionModel

from plugins.core import checkpoint
from tests.ultralytics.conftest import Run, Train, tensors, without_plug
from tests.ultralytics.saved import ALONE, Killed, keep_copies, stop_after


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
