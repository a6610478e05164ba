"""Two processes on gloo equal one process with the same effective batch."""

from __future__ import annotations

import json
import sys

import torch

from plugins.easyocr import fit
from tests import processes, reference

SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from plugins.easyocr import fit
fit(json.loads(sys.argv[1]), accumulate=2, say=lambda line: None)
"""


def test_two_ranks_equal_one_process(tiny, tmp_path):
    options = {
        **tiny, "batch_size": 5, "num_iter": 5, "valInterval": 5, "optim": "adadelta", "lr": 1.0, "patience": 3,
        "accel": {"precision": "fp32", "batchnorm": "freeze", "ema": 0.9},
    }  # fmt: skip
    alone = fit(options, accumulate=4, say=lambda line: None)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    two = {**options, "output": str(tmp_path / "two")}
    processes.launch(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script),
         json.dumps(two)],
        tmp_path / "log", seconds=240,
    )  # fmt: skip
    ours = torch.load(tmp_path / "two" / "tiny_numbers" / "last.pt", weights_only=True)
    right = torch.load(alone.folder / "last.pt", weights_only=True)
    assert ours["counts"]["updates"] == right["counts"]["updates"] == 5
    for part in ("model", "average"):
        a, b = (state[part]["shadow"] if part == "average" else state[part] for state in (ours, right))
        floats = [name for name in b if b[name].is_floating_point()]
        assert reference.difference({n: a[n] for n in floats}, {n: b[n] for n in floats}) < 1e-5
    report = json.loads((tmp_path / "two" / "tiny_numbers" / "accel_report.json").read_text())
    assert report["window"]["exact"]
