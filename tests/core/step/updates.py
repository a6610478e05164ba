"""Optimizers, windows and gradients for the tests of an update."""

from __future__ import annotations

from functools import partial

import torch

from tests.core.tiny import Batch, joined

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


def windows(parts: list[Batch], k: int) -> list[Batch]:
    return [joined(parts[at : at + k]) for at in range(0, len(parts), k)]


def gradients_at_step(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Filled with the gradients that each optimizer step sees."""
    seen: list[list[torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda opt, *_: seen.append([p.grad.clone() for g in opt.param_groups for p in g["params"]])
    )
    return seen


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


def poisoned(parts: list[Batch], at: int, value: float = float("nan")) -> list[Batch]:
    parts[at].x[0, 0] = value
    return parts
