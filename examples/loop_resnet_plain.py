"""A hand-written loop: ResNet-18 on generated pictures. Its twin, loop_resnet.py, is the same with Accelerated."""

from __future__ import annotations

import argparse

import torch
from gratings import CLASSES, gratings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18


def main(epochs: int = 3, batch: int = 32, count: int = 640) -> float:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*gratings(count, seed=1)), batch, shuffle=True)
    images_held_out, labels_held_out = gratings(240, seed=2)
    model, criterion = resnet18(num_classes=CLASSES), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs * len(loader) + 1)

    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images_held_out).argmax(1) == labels_held_out).float().mean().item()
        print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args().epochs)
