"""A YOLO epoch on mirror: exact windows and a tail, the host's EMA, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from ultralytics.engine import trainer as host

from plugins.core import devices
from tests import mirror
from tests.core.tiny import same
from tests.ultralytics.conftest import Run, data, models, train  # noqa: F401

DEVICE = torch.device("mirror", 0)
SCALE = 1024.0
IMAGES = 14  # batches of four: a window of three, and a tail of one batch of two
PLUG = {"accumulate": 3, "clip_norm": 1.0, "compile": "off", "memory_format": "host"}
Train = Callable[..., Run]


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


class Updates:
    """Reads from the device from each update's end to the next."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def between(self) -> list[int]:
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().float() for name, tensor in tensors.items()}


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[n] - theirs[n]).abs().max()) for n in theirs)


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_epoch_equals_the_cpu_s(
    precision: str, limit: float, train: Train, on: Callable[[torch.device], None]  # noqa: F811
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
