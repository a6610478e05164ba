"""The slow and obviously right trainer: one plain big batch, no tricks. Everything is compared with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


def gradients(model: nn.Module, batch: Any, loss: Loss) -> dict[str, Tensor]:
    """The gradients of one batch, by parameter name, on a copy of the model."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    clip_norm: float | None = None,
    decay: float | None = None,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Train a copy on whole batches, one update each; returns it and its average (floating tensors, no ramp)."""
    model = copy.deepcopy(model)
    steps = optimizer(model.parameters())
    average = {n: t.clone() for n, t in model.state_dict().items()}
    for batch in batches:
        steps.zero_grad()
        loss(model, batch).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        steps.step()
        if decay is not None:
            for name, tensor in model.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * tensor
    return model, average


def difference(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor: |a - b| / |b| in the L2 norm, over all tensors together."""
    assert ours.keys() == right.keys(), sorted(ours.keys() ^ right.keys())
    off = sum(float((ours[n].double() - right[n].double()).square().sum()) for n in right) ** 0.5
    size = sum(float(right[n].double().square().sum()) for n in right) ** 0.5
    return off / max(size, 1e-30)
