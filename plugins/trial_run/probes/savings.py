"""What a user may do to save memory and no setting does: done in a trial in the user's place, to measure it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from plugins.errors import AccelError
from plugins.trial_run.probes.base import Probe

LIBRARIES = ("bitsandbytes.optim", "torchao.optim")  # the first one that is installed; torchao compiles its step


def freeze_half(model: nn.Module) -> None:
    """No gradient for the first half of the parameters, in the model's own order: nothing is kept for it then.

    The last one always trains.
    """
    parameters = list(model.parameters())
    half, seen = sum(p.numel() for p in parameters) / 2, 0
    for parameter in parameters[:-1]:
        if seen >= half:
            return
        parameter.requires_grad_(False)
        seen += parameter.numel()


def eight_bit(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of the same kind with 8-bit states do this one's steps, with its parameters and rates.

    Raises:
        AccelError: neither library has one of this kind, or none is installed.
    """
    name = f"{type(optimizer).__name__}8bit"
    for library in LIBRARIES:
        try:
            kind = getattr(importlib.import_module(library), name, None)
        except ImportError:
            continue
        if kind is not None:
            small = _like(kind, optimizer)
            optimizer.step = small.step  # type: ignore[method-assign]  # of this instance
            return
    raise AccelError(f"8-bit states: no {name} in {' or '.join(one.partition('.')[0] for one in LIBRARIES)} here")


def _like(kind: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of another class over the very groups of this one, so that a schedule's rates reach it."""
    group = optimizer.param_groups[0]
    shared = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "momentum") if name in group}
    small: torch.optim.Optimizer = kind([p for one in optimizer.param_groups for p in one["params"]], **shared)
    for one in optimizer.param_groups:
        one.update({name: value for name, value in small.param_groups[0].items() if name not in one})
    small.param_groups = optimizer.param_groups
    return small


class Freeze(Probe):
    """The first half of the parameters is frozen."""

    @override
    def begin(self) -> None:
        freeze_half(self.session.model)


class EightBit(Probe):
    """The optimizer's states have 8 bits."""

    @override
    def begin(self) -> None:
        eight_bit(self.session.optimizer)


class ActivationBudget(Probe):
    """Compiled code keeps at most this share of its activations, and computes the rest again."""

    BUDGET = 0.5

    @override
    def begin(self) -> None:
        import torch._functorch.config as config

        config.activation_memory_budget = self.BUDGET
