"""DDP on two CPU ranks is one big batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.lightning.ranks import SAMPLES, Positive
from tests.lightning.runs import X, Y, off, weights

ROOT = Path(__file__).parents[2]


def test_two_ranks_of_unequal_targets_are_the_big_batch(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "lightning" / "ranks.py"), str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    big = Positive()
    optimizer = big.configure_optimizers()
    for part in (slice(0, 8), slice(8, SAMPLES)):  # two micro-batches of 2 on either rank, then a tail of one
        optimizer.zero_grad()
        big.training_step((X[part], Y[part]), 0).backward()
        optimizer.step()
    assert off(torch.load(tmp_path / "weights.pt", weights_only=True), weights(big)) < 1e-6
    found = json.loads((tmp_path / "accel_report.json").read_text())
    assert (found["window"]["updates"], found["window"]["exact"]) == (2, True)
