"""Timed steps on the batch at hand: forward and backward only, so that weights and optimizer are never touched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from plugins.core import plan as planning
from plugins.core.checkpoint import random_state, set_random_state
from plugins.core.plan import Plan, Timing

MATRIX = ("mm", "conv", "attention", "linear", "matmul", "einsum")


class Trial(Protocol):
    """What a host offers at a window's start. `loss` runs forward and loss on the batch at hand, in its autocast."""

    def loss(self) -> Tensor: ...

    def apply(self, precision: str, memory_format: str) -> None: ...


def time_steps(
    model: nn.Module,
    device: torch.device,
    trial: Trial,
    plan: Plan,
    warn: Callable[[str], None],
    warm: bool = True,
    hopeless: float = math.inf,
) -> Timing | None:
    """Seconds of forward and backward on the batch at hand.

    None where memory does not suffice, or the first step took longer than `hopeless` seconds.
    """
    timing, state = Timing(plan), random_state()
    try:
        for index in range(planning.REPEATS + warm):
            set_random_state(state)
            began = time.perf_counter()
            loss = trial.loss()
            loss.sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken = time.perf_counter() - began
            model.zero_grad(set_to_none=True)
            if index >= warm:
                timing.seconds.append(taken)
            elif taken > hopeless:
                return None
    except torch.OutOfMemoryError:
        warn(f"plan {plan.name}: dropped, out of memory in its trial")
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None
    timing.loss = float(loss.detach().float().sum())
    return timing


def fusable_share(model: nn.Module, device: torch.device, trial: Trial) -> float:
    """The share of a step spent outside matrix products and convolutions, from one profiled step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    state = random_state()
    with profile(activities=activities) as profiled:
        trial.loss().sum().backward()
    set_random_state(state)
    model.zero_grad(set_to_none=True)
    matrix = total = 0.0
    for event in profiled.key_averages():
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        total += spent
        if any(part in event.key for part in MATRIX):
            matrix += spent
    return 1.0 - matrix / total if total else 0.0
