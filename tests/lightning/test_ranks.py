"""DDP on two CPU ranks is one big batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests import processes
from tests.lightning.ranks import SAMPLES, Positive
from tests.lightning.runs import X, Y, off, weights


def test_two_ranks_of_unequal_targets_are_the_big_batch(tmp_path: Path) -> None:
    script = str(processes.ROOT / "tests" / "lightning" / "ranks.py")
    processes.launch([sys.executable, script, str(tmp_path)], tmp_path / "log", cwd=tmp_path)
    big = Positive()
    optimizer = big.configure_optimizers()
    for part in (slice(0, 8), slice(8, SAMPLES)):  # two micro-batches of 2 on either rank, then a tail of one
        optimizer.zero_grad()
        big.training_step((X[part], Y[part]), 0).backward()
        optimizer.step()
    assert off(torch.load(tmp_path / "weights.pt", weights_only=True), weights(big)) < 1e-6
    found = json.loads((tmp_path / "accel_report.json").read_text())
    assert (found["window"]["updates"], found["window"]["exact"]) == (2, True)
