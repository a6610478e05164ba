"""The loop of loop_resnet_plain.py with Accelerated: precision and layout measured, clipping, EMA, batches of 32 in
micro-batches of 16, and a checkpoint that a stopped run goes on from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gratings import CLASSES, gratings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from plugins.loop import Accelerated

OPTIONS = {"precision": "auto", "accumulate": 2, "clip_norm": 5.0, "ema": 0.9}


def main(
    epochs: int = 3, batch: int = 16, count: int = 640, folder: str = "demo/loop", options: Mapping[str, Any] = OPTIONS
) -> float:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*gratings(count, seed=1)), batch, shuffle=True)
    images_held_out, labels_held_out = gratings(240, seed=2)
    model, criterion = resnet18(num_classes=CLASSES), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    accumulate = options.get("accumulate", 1)
    accel = Accelerated(
        model,
        optimizer,
        schedule=lambda steps: torch.optim.lr_scheduler.OneCycleLR(steps, 2e-3, epochs * len(loader) // accumulate + 1),
        **options,
    )
    last = Path(folder) / "last.pt"
    begin = accel.resume(last)["epoch"] if last.is_file() else 0

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return criterion(model(images), labels)

    accuracy = 0.0
    for epoch in range(begin, epochs):
        accel.train()
        for batch in accel.batches(loader, epochs_left=epochs - epoch):
            accel.training_step(loss_of, batch)
        with accel.validation(), accel.forward(images_held_out) as moved:
            accuracy = (model(moved).argmax(1).cpu() == labels_held_out).float().mean().item()
        print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}")
        accel.save(last, epoch=epoch + 1)
    accel.end(folder)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args().epochs)
