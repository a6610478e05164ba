"""The smallest Lightning runs: a module whose loss is a mean over samples, its data, and a fit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from plugins.lightning import AccelLightning

X = torch.randn(14, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randn(14, 2, generator=torch.Generator().manual_seed(1))


class Module(L.LightningModule):
    """An MLP; counts what is asked of it."""

    def __init__(self, rate: float = 0.1, norm: bool = False, bad: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(5) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(3, 5), middle, nn.Linear(5, 2))
        self.rate, self.bad, self.steps, self.seen = rate, bad, 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.steps += 1
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        if index == self.bad:
            loss = loss * float("nan")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(float(self.net[0].weight.sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def loader(size: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=size, shuffle=shuffle)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    single: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **single, **options})


def fit(
    folder: Path, module: Module, size: int, k: int, plug: AccelLightning | None = None, **options: Any
) -> L.Trainer:
    """One fit over batches of `size`, `k` of them an update."""
    made = trainer(folder, *([plug] if plug is not None else []), accumulate_grad_batches=k, **options)
    made.fit(module, loader(size))
    return made


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def off(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two states."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
