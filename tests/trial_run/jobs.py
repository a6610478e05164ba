"""Tiny jobs of a user's, as scripts: shared by the tests of trials and of preflight."""

from __future__ import annotations

from pathlib import Path

from plugins.trial_run.launch import TrialResult, run
from plugins.trial_run.request import TrialRequest

LOOP = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from plugins.loop import Accelerated

torch.manual_seed({seed})
inputs = torch.randn(64, 8)
labels = (inputs.sum(1) > 0).long()
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
accel = Accelerated(model, optimizer, {options})
loader = DataLoader(TensorDataset(inputs, labels), {batch}, shuffle=True)

def loss_of(batch):
    {body}
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

{before}
for epoch in range({epochs}):
    for batch in accel.batches(loader, epochs_left={epochs} - epoch):
        {step}
    {after}
accel.save("user/last.pt")
accel.end("user")
print("the end")
"""
USUAL = {
    "seed": 0,
    "model": "nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))",
    "lr": 0.3,
    "options": "accumulate=2",
    "batch": 4,
    "epochs": 8,
    "body": "pass",
    "before": "",
    "step": "accel.training_step(loss_of, batch)",
    "after": "",
}


def loop(folder: Path, **parts: object) -> list[str]:
    """The command of a hand-written loop: `parts` of `USUAL` in its place."""
    script = folder / "train.py"
    script.write_text(LOOP.format(**{**USUAL, **parts}), encoding="utf-8")
    return ["python", str(script)]


def trial(folder: Path, command: list[str], updates: int = 3, **request: object) -> TrialResult:
    return run(command, TrialRequest(updates, folder / "trial", **request), timeout=120)  # type: ignore[arg-type]
