"""Plain loops, and the plug beside them: shared by the tests of hand-written loops."""

from __future__ import annotations

import torch
from torch import nn

from plugins.loop import Accelerated


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def data(count=24, seed=1):
    """Inputs [count, 8] and labels [count]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=draw), torch.randint(0, 3, (count,), generator=draw)


def sgd(*modules, lr=0.1):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr, momentum=0.9)


def accelerated(model, optimizer=None, **options):
    return Accelerated(model, optimizer or sgd(model), **{"say": lambda line: None, "memory_format": "host", **options})


def off(ours, theirs):
    """The largest difference of two modules' parameters."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def plain(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
