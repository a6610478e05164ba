"""EasyOCR's `fit` on mirror: a whole run with validation, the Reader's files and a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core.system import devices
from plugins.easyocr import fit
from plugins.easyocr import training as plug
from tests import mirror
from tests.core.tiny import same
from tests.easyocr.conftest import TINY, numbers, write_folder

SCALE = 1024.0
OPTIONS = {"accumulate": 2, "ema": 0.9, "clip_norm": 0.5, "plan": "off", "compile": "off"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lines")
    write_folder(folder / "train", numbers(12))
    write_folder(folder / "valid", numbers(4, seed=1), seed=100)
    return {
        "number": "0123456789", "experiment_name": "tiny_numbers", "train_data": str(folder / "train"),
        "valid_data": str(folder / "valid"), "imgH": 32, "batch_size": 4, "num_iter": 4, "valInterval": 2,
        "optim": "adam", "lr": 0.0001, "progress": False, "tensorboard": False, **TINY,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler's own first scale overflows in so small a network, and falls for several updates."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=SCALE))


def run(data: dict[str, Any], folder: Path, **more: Any) -> Any:
    return fit({**data, "output": str(folder)}, say=lambda line: None, **{**OPTIONS, **more})


def state(result: Any) -> dict[str, Any]:
    return dict(torch.load(result.folder / "last.pt", weights_only=True))


@pytest.fixture(scope="module")
def on_the_cpu(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The same run on the CPU, once a precision."""

    @cache
    def get(precision: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "own", lambda: devices.CPU)
            return run(data, tmp_path_factory.mktemp("cpu"), precision=precision)

    return get


@pytest.mark.parametrize(("precision", "limit", "an_update"), [("fp32", 1e-5, 1), ("bf16", 1e-2, 1), ("fp16", 1e-2, 2)])
def test_run_equals_the_cpu_s_with_one_read_an_update(
    precision: str, limit: float, an_update: int, data: dict[str, Any], on_the_cpu: Callable[[str], Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reads: list[tuple[bool, int]] = []
    own = plug.Run._micro_batch

    def counted(self: Any, batch: Any) -> Any:
        before = mirror.reads()
        outcome = own(self, batch)
        reads.append((outcome is not None, mirror.reads() - before))
        return outcome

    theirs = on_the_cpu("bf16" if precision == "fp16" else precision)  # a CPU trains in no fp16
    monkeypatch.setattr(plug.Run, "_micro_batch", counted)
    ours = run(data, tmp_path, precision=precision)
    assert reads == [(False, 0), (True, an_update)] * 4
    found, wanted = state(ours)["model"], state(theirs)["model"]
    assert max(float((found[n].float() - wanted[n].float()).abs().max()) for n in wanted) <= limit
    assert [row.update for row in ours.history] == [2, 4]
    losses = ([row.valid_loss for row in result.history] for result in (ours, theirs))
    assert next(losses) == pytest.approx(next(losses), rel=limit)
    assert ours.stopped == "num_iter"
    assert all(file.is_file() for file in ours.exported.files)


def test_infinite_gradient_in_fp16_skips_the_update(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = plug.Run._micro_batch, []

    def second_is_infinite(self: Any, batch: Any) -> Any:
        if self.at.position in (2, 3):
            batch.images = torch.full_like(batch.images, math.inf)
        outcome = own(self, batch)
        if outcome is not None:
            scaler = self.accel.session.update.scaler
            average = {n: t.cpu().clone() for n, t in self.accel.average.state_dict()["shadow"].items()}
            live = {n: p.detach().cpu().clone() for n, p in self.model.named_parameters()}
            seen.append((outcome.stepped, scaler.get_scale(), live, average))
        return outcome

    monkeypatch.setattr(plug.Run, "_micro_batch", second_is_infinite)
    run(data, tmp_path, precision="fp16")
    (_, scale, weights, average), (stepped, fell, kept, kept_average), *rest = seen
    assert not stepped
    assert fell == scale / 2
    assert same(kept, weights)
    assert same(kept_average, average)
    assert all(one[0] for one in rest)


def test_resumed_run_equals_the_straight_one(data: dict[str, Any], tmp_path: Path) -> None:
    straight = run(data, tmp_path / "straight", precision="fp32")
    run(data, tmp_path / "half", precision="fp32", num_iter=2)
    rest = run(data, tmp_path / "half", precision="fp32", resume=True)
    assert same(state(rest)["model"], state(straight)["model"])
    assert same(state(rest)["average"], state(straight)["average"])
