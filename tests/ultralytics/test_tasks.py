"""Every task of the host trains through the plug; what equals the big batch, and what the report calls approximate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ultralytics.utils import ROOT as HOST_ROOT

from tests.ultralytics.conftest import Train
from tests.ultralytics.spy import Spy

PLAIN_HEAD = {"accumulate": 2, "batchnorm": "freeze", "clip_norm": "off"}

APPROXIMATE = {
    "detect": [],
    "end2end": [],
    "obb": [],
    "classify": [],
    "segment": ["v8SegmentationLoss: seg_loss, sem_loss"],
    "pose": ["v8PoseLoss: pose_loss, kobj_loss"],
    "rtdetr": ["RT-DETR: denoising queries depend on the micro-batch"],
}


@pytest.mark.parametrize("head", APPROXIMATE)
def test_every_task_trains_and_is_exact_or_named(head: str, train: Train) -> None:
    host: dict[str, Any] = {"dropout": 0.0} if head == "classify" else {}
    run = train(head, accel=PLAIN_HEAD, images=18, epochs=2, val=True, spy=Spy(heavy=head != "rtdetr"), **host)
    facts = run.report["window"]
    assert facts["approximate_terms"] == APPROXIMATE[head]
    assert facts["exact"] is not bool(APPROXIMATE[head])
    # 5 micro-batches an epoch, the last of 2 images. An end-to-end criterion changes with the epoch: its windows end.
    sizes = [2, 2, 1, 2, 2, 1] if head == "end2end" else [2] * 5
    assert facts["updates"] == len(run.spy.updates) == len(sizes)
    assert facts["dropped_micro_batches"] == 0
    assert all(t.isfinite().all() for t in run.weights.values())
    assert (run.folder / "weights" / "best.pt").is_file()
    if head != "rtdetr":
        assert [len(u.batches) for u in run.spy.updates] == sizes
    if not APPROXIMATE[head]:
        for update in run.spy.updates:
            assert _dropout_off(update.model)
            assert update.off() <= 1e-6


def _dropout_off(model: torch.nn.Module) -> bool:
    return all(m.p == 0.0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def test_the_host_s_own_end_to_end_model(train: Train, tmp_path: Path) -> None:
    """yolo26n.yaml as it is shipped, at the smallest width."""
    shipped = yaml.safe_load((HOST_ROOT / "cfg" / "models" / "26" / "yolo26.yaml").read_text())
    shipped["scales"] = {"n": [0.25, 0.0625, 1024]}
    small = tmp_path / "small26.yaml"
    small.write_text(yaml.safe_dump(shipped))
    run = train(accel=PLAIN_HEAD, model=small, images=16, spy=Spy(heavy=True))
    assert run.report["window"]["exact"] is True
    assert len(run.spy.updates) == 2
    for update in run.spy.updates:
        assert update.off() <= 1e-6


def test_end_to_end_warm_up_rises_and_ends_on_the_target(train: Train) -> None:
    """Windows end with every epoch, so that there are more updates an epoch than micro-batches / K."""
    run = train("end2end", accel={"accumulate": 4}, images=20, epochs=4, warmup_epochs=3, lr0=0.01, lrf=1.0)
    rates = [u.rates[0] for u in run.spy.updates]  # the weights': from 0 up
    assert len(rates) == 8
    assert rates == sorted(rates)
    assert rates == pytest.approx([0.01 * min(n / 6, 1.0) for n in range(8)])


def test_compiling_rtdetr_is_refused_with_the_reason(train: Train) -> None:
    run = train("rtdetr", accel={"compile": "on", "compile_backend": "eager", "accumulate": 2})
    facts = run.report["compile"]
    assert (facts["decision"], facts["graphs"]) == ("eager", 0)
    assert "RTDETRDetectionModel passes labels into its forward" in facts["reason"]
    assert sum("passes labels into its forward" in w for w in run.report["warnings"]) == 1
    assert run.report["window"]["updates"] == 2
