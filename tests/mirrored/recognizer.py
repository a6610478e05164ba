"""EasyOCR's `fit` on mirror: a whole run with validation, the Reader's files and a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins import easyocr as plug
from plugins.core import devices
from plugins.easyocr import fit
from tests import mirror
from tests.core.tiny import same
from tests.easyocr.conftest import TINY, numbers, write_folder

OPTIONS = {"accumulate": 2, "ema": 0.9, "clip_norm": 0.5, "plan": "off", "compile": "off"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lines")
    write_folder(folder / "train", numbers(12))
    write_folder(folder / "valid", numbers(4, seed=1), seed=100)
    return {
        "number": "0123456789", "experiment_name": "tiny_numbers", "train_data": str(folder / "train"),
        "valid_data": str(folder / "valid"), "imgH": 32, "batch_size": 4, "num_iter": 4, "valInterval": 2,
        "optim": "adam", "lr": 0.001, "progress": False, "tensorboard": False, **TINY,
    }  # fmt: skip


def run(data: dict[str, Any], folder: Path, **more: Any) -> Any:
    return fit(
        {**data, "output": str(folder), **OPTIONS, **more}, say=lambda line: None, resume=more.pop("resume", False)
    )


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "own", lambda: torch.device("cpu"))


def state(result: Any) -> dict[str, Any]:
    return dict(torch.load(result.folder / "last.pt", weights_only=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_run_equals_the_cpu_s(
    precision: str, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run(data, tmp_path / "mirror", precision=precision)
    on_the_cpu(monkeypatch)
    theirs = run(data, tmp_path / "cpu", precision="bf16" if precision == "fp16" else precision)  # a CPU has no fp16
    found, wanted = state(ours)["model"], state(theirs)["model"]
    limit = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}[precision]
    assert max(float((found[n].float() - wanted[n].float()).abs().max()) for n in wanted) <= limit
    assert [row.update for row in ours.history] == [2, 4]
    assert [row.valid_loss for row in ours.history] == pytest.approx(
        [row.valid_loss for row in theirs.history], rel=limit
    )
    assert ours.stopped == "num_iter"
    assert all(file.is_file() for file in ours.exported.files)


@pytest.mark.parametrize(("precision", "an_update"), [("fp32", 1), ("fp16", 2)])
def test_no_read_a_micro_batch_and_one_an_update(
    precision: str, an_update: int, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[bool, int]] = []
    own = plug._Run._micro_batch

    def counted(self: Any, batch: Any) -> Any:
        before = mirror.reads()
        outcome = own(self, batch)
        reads.append((outcome is not None, mirror.reads() - before))
        return outcome

    monkeypatch.setattr(plug._Run, "_micro_batch", counted)
    run(data, tmp_path, precision=precision)
    assert reads == [(False, 0), (True, an_update)] * 4


def test_infinite_gradient_in_fp16_skips_the_update(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = plug._Run._micro_batch, []

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

    monkeypatch.setattr(plug._Run, "_micro_batch", second_is_infinite)
    run(data, tmp_path, precision="fp16")
    (_, scale, weights, average), (stepped, fell, kept, kept_average), *rest = seen
    assert not stepped
    assert fell == scale / 2
    assert same(kept, weights)
    assert same(kept_average, average)
    assert all(one[0] for one in rest)


def test_resumed_run_equals_the_straight_one(data: dict[str, Any], tmp_path: Path) -> None:
    straight = run(data, tmp_path / "straight", precision="fp16")
    run(data, tmp_path / "half", precision="fp16", num_iter=2)
    rest = run(data, tmp_path / "half", precision="fp16", resume=True)
    assert same(state(rest)["model"], state(straight)["model"])
    assert same(state(rest)["average"], state(straight)["average"])


def test_plan_is_measured(data: dict[str, Any], tmp_path: Path) -> None:
    result = run(data, tmp_path, plan="auto", precision="auto", num_iter=8)
    assert result.stopped == "num_iter"
