"""A convolutional network with BatchNorm, its batches, and a loop over them."""

from __future__ import annotations

import torch
from torch import nn

from plugins.loop import Accelerated


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def batches(sizes, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 1, 8, 8, generator=draw), torch.randint(3, (n,), generator=draw)) for n in sizes]


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def accelerated(model, optimizer=None, **options):
    return Accelerated(
        model, optimizer or sgd(model.parameters()), say=lambda line: None, **{"memory_format": "host", **options}
    )


def run(accel, data):
    accel.train()
    for images, labels in data:
        with accel.forward(images, labels) as (moved, targets):
            loss = nn.functional.cross_entropy(accel.model(moved), targets)
        accel.backward(loss, weight=len(labels))
