"""Pictures of stripes in six directions, for the ResNet twins: generated, seeded, nothing to download."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLASSES = 6


def gratings(count: int, seed: int, size: int = 32, noise: float = 0.7) -> tuple[Tensor, Tensor]:
    """(images [count, 3, size, size] around 0, labels [count]); label k: stripes at k * 30 degrees."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    angle = labels * math.pi / CLASSES
    phase, period = torch.rand(2, count, generator=draw) * torch.tensor([[2 * math.pi], [6.0]])
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    waves = torch.sin(along * (2 * math.pi / (period + 6))[:, None, None] + phase[:, None, None])
    colour = torch.rand(count, 3, 1, 1, generator=draw) + 0.3
    pictures = waves[:, None] * colour + noise * torch.randn(count, 3, size, size, generator=draw)
    return pictures, labels
