"""A YOLO epoch on mirror: exact windows and a tail, the host's EMA, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from ultralytics.engine import trainer as host

from plugins.core.system import devices
from tests import mirror
from tests.core.tiny import same
from tests.ultralytics import conftest as yolo

DEVICE = torch.device("mirror", 0)
SCALE = 1024.0
IMAGES = 14  # batches of four: a window of three, and a tail of one batch of two
PLUG = {"accumulate": 3, "clip_norm": 1.0, "compile": "off", "memory_format": "host"}
Train = Callable[..., yolo.Run]

data, models, train = yolo.data, yolo.models, yolo.train  # its fixtures


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device], None]:
    """Puts the device in the place of the host's choice, which knows none but its own."""

    def choose(device: torch.device) -> None:
        monkeypatch.setattr(host, "select_device", lambda *args, **kwargs: device)

    return choose


@pytest.fixture(autouse=True)
def _small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler's own first scale overflows in so small a network."""
    own = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **more: own(*args, **{"init_scale": SCALE, **more}))


class Reads:
    """Values read from the device in each batch of the epoch, its update included."""

    def __init__(self) -> None:
        self.a_batch: list[int] = []
        self.callbacks = {"on_train_batch_start": self.start, "on_train_batch_end": self.end}

    def start(self, trainer: Any) -> None:
        self.before = mirror.reads()

    def end(self, trainer: Any) -> None:
        self.a_batch.append(mirror.reads() - self.before)


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().float() for name, tensor in tensors.items()}


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[n] - theirs[n]).abs().max()) for n in theirs)


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_epoch_equals_the_cpu_s(
    precision: str,
    limit: float,
    train: Train,
    on: Callable[[torch.device], None],
) -> None:
    found = {}
    for device in (DEVICE, devices.CPU):
        on(device)
        there = "bf16" if (precision, device) == ("fp16", devices.CPU) else precision  # a CPU trains in no fp16
        run = train(accel={**PLUG, "precision": there}, images=IMAGES, name=device.type, amp=False, val=True)
        assert run.trainer.device == device
        found[device.type] = [on_cpu(run.weights), on_cpu(run.average)]
        assert run.report["window"]["skipped_updates"] == 0
    for ours, theirs in zip(found["mirror"], found["cpu"], strict=True):
        assert off(ours, theirs) <= limit


@pytest.mark.parametrize(("precision", "an_update"), [("fp32", 1), ("fp16", 2)])
def test_no_read_of_our_own_a_micro_batch_and_one_an_update(
    precision: str,
    an_update: int,
    train: Train,
    on: Callable[[torch.device], None],
) -> None:
    on(DEVICE)
    ours, alone = Reads(), Reads()
    train(accel={**PLUG, "precision": precision}, images=IMAGES, callbacks=ours.callbacks, amp=False)
    train(images=IMAGES, callbacks=alone.callbacks, name="alone", amp=False, nbs=12)
    more = [mine - hosts for mine, hosts in zip(ours.a_batch, alone.a_batch, strict=True)]
    assert len(more) == 4
    assert all(reads <= 0 for reads in more[:2])
    assert all(reads <= an_update for reads in more[2:]), (ours.a_batch, alone.a_batch)


def test_infinite_gradient_in_fp16_skips_the_update(
    train: Train,
    on: Callable[[torch.device], None],
) -> None:
    on(DEVICE)
    seen: list[Any] = []

    def spoil(trainer: Any) -> None:
        """The second of three updates."""
        if trainer.accel_batches == 1:
            seen.append([on_cpu(trainer.model.state_dict()), on_cpu(trainer.ema.ema.state_dict())])
            weight = next(p for p in trainer.model.parameters() if p.requires_grad)
            trainer.accel_hook = weight.register_hook(lambda gradient: gradient * float("inf"))

    def after(trainer: Any) -> None:
        if trainer.accel_batches == 1:
            trainer.accel_hook.remove()
            seen.append([on_cpu(trainer.model.state_dict()), on_cpu(trainer.ema.ema.state_dict())])
            seen.append(trainer.scaler.get_scale())
        trainer.accel_batches += 1

    callbacks = {
        "on_train_start": lambda trainer: setattr(trainer, "accel_batches", 0),
        "on_train_batch_start": spoil,
        "on_train_batch_end": after,
    }
    run = train(accel={**PLUG, "accumulate": 1, "precision": "fp16"}, images=12, callbacks=callbacks, amp=False)
    before, kept, scale = seen
    assert same(kept, before)
    assert scale == SCALE / 2
    window = run.report["window"]
    assert (window["updates"], window["skipped_updates"]) == (2, 1)


def test_resumed_run_equals_the_straight_one(
    train: Train,
    on: Callable[[torch.device], None],
    tmp_path: Path,
) -> None:
    on(DEVICE)

    class Stop(Exception):
        pass

    def stop(trainer: Any) -> None:
        if trainer.epoch == 0:
            raise Stop

    options = {"accel": {**PLUG, "precision": "fp32"}, "images": IMAGES, "amp": False}
    straight = train(**options, name="straight", epochs=2)
    with pytest.raises(Stop):
        train(**options, name="half", epochs=2, callbacks={"on_model_save": stop})
    rest = train(accel=options["accel"], name="half", resume=tmp_path / "half" / "weights" / "last.pt")
    assert off(on_cpu(rest.weights), on_cpu(straight.weights)) == 0.0
    assert off(on_cpu(rest.average), on_cpu(straight.average)) == 0.0
