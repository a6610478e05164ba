"""Two CPU ranks under DDP, of unequal targets; rank 0 writes the weights. Started by test_ranks.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plugins.lightning import AccelLightning
from tests.lightning.runs import Module, X, Y

SAMPLES = 12


class Positive(Module):
    """A loss that is a mean over the rows of y whose first value is positive."""

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        rows = y[:, 0] > 0
        return nn.functional.mse_loss(self(x)[rows], y[rows], reduction="sum") / max(int(rows.sum()) * 2, 1)


def positive(batch: Any) -> int:
    return int((batch[1][:, 0] > 0).sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    module = Positive()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False, max_epochs=1,
        accumulate_grad_batches=2, enable_checkpointing=False, default_root_dir=folder,
        callbacks=[AccelLightning(weight=positive)], **quiet,
    )  # fmt: skip
    mine = slice(int(os.environ.get("LOCAL_RANK", "0")), SAMPLES, 2)  # every second sample, in order
    trainer.fit(module, DataLoader(TensorDataset(X[mine], Y[mine]), batch_size=2))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "weights.pt")
