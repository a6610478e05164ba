"""When a trial or a compile is worth its cost, from what is left of the run. Pure; measures nothing.

A candidate is tried only while its cost can still be won back in what is left of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from plugins.core.plan import Plan, Timing
from plugins.core.step.precision import HALF, bf16_is_fast

TRIAL_SHARE = 0.02  # of the time that is left: what trials may cost in all
COMPILE_SHARE = 0.10  # of the time that is left: what a compile that is likely to pay may cost
LIKELY_SHARE = 0.18  # of a step that can be fused: from there a compile is likely to pay (0.16 gained 5 %)
HALF_SHARE = 0.3  # the same on a CPU in half precision, below which it lost: at 0.12 15 %; at 0.4 it gained 13 %
REPEATS = 2  # timed steps a candidate, after one that is not timed
EXPECTED = 0.6  # of the plain step: what a candidate worth a trial is expected to take
HOPELESS = 1.5  # times the plain step: a candidate whose first step takes longer is not timed further
GAIN = 1.0  # of the fusable share: what fusing may save (0.84 measured of blocks of pointwise work)
START_SECONDS = 6.0  # of a worker: it imports torch and its compiler, and precompiles headers
PATIENCE = 3.0  # times the guess: what a worker beside the run may take at least
WAITING_PATIENCE = 1.5  # times the guess, where the run waits for it
SECONDS_A_LAYER = {"cpu": 0.6, "cuda": 0.4}  # cold compile, forward and backward, of one leaf module
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layouts(model: nn.Module, device: torch.device, start: Plan, open_fields: frozenset[str]) -> list[Plan]:
    """Plans without compile that are worth trying here, the most promising first."""
    convolves = any(isinstance(m, nn.Conv2d) for m in model.modules())
    precisions = ["bf16"] if "precision" in open_fields and bf16_is_fast(device) else []
    formats = ["channels_last"] if "memory_format" in open_fields and convolves else []
    both = [(p, f) for p in precisions for f in formats]
    single = [(start.precision, f) for f in formats] + [(p, start.memory_format) for p in precisions]
    return [Plan(p, f) for p, f in both + single if Plan(p, f) != start]


def fastest(plain: Timing, timings: Sequence[Timing]) -> Timing:
    """The fastest of those that agree with the plain step and beat it by more than the spread; else the plain one."""
    winners = [timing for timing in timings if timing.agrees(plain) and timing.beats(plain)]
    return min(winners, key=lambda timing: timing.middle, default=plain)


def compile_seconds(modules: Sequence[nn.Module], device: torch.device) -> float:
    """A guess of a cold compile's seconds in a worker, from the leaf modules; modules that look alike count once.

    Measured on 2 CPU cores: 146 s for YOLOv8n whole (about 225 leaves), 35 s for a 6-layer BERT.
    """
    unique = {(type(m), tuple(tuple(p.shape) for p in m.parameters())): m for m in modules}
    leaves = sum(1 for module in unique.values() for m in module.modules() if not list(m.children()))
    return START_SECONDS + leaves * SECONDS_A_LAYER.get(device.type, 0.6)


def cannot_gain(modules: Sequence[nn.Module], device: torch.device) -> str:
    """Why a compile of these would not pay whatever is left of the run, or empty."""
    if device.type == "cpu" and any(isinstance(m, CONVOLUTIONS) for module in modules for m in module.modules()):
        return "convolutions gained nothing from compile on a CPU"
    return ""


def too_little_to_fuse(fusable: float, device: torch.device, precision: str) -> str:
    """Why a step of which this share can be fused would not pay compiled whatever is left of the run, or empty."""
    if device.type == "cpu" and precision in HALF and fusable < HALF_SHARE:
        return f"{fusable:.0%} of a step can be fused; in {precision} on a CPU compile needs {HALF_SHARE:.0%} to gain"
    return ""


def compile_share(fusable: float) -> float:
    """What share of the time left a compile may cost: more where it is likely to pay."""
    return COMPILE_SHARE if fusable >= LIKELY_SHARE else TRIAL_SHARE


def seconds_to_pay(cost: float, fusable: float) -> float:
    """The seconds that must be left of a run, at its present speed, for a compile of `cost` seconds to be tried.

    `fusable` is the share of a step that can be fused. The cost must be within its share of what is left, and be won
    back.
    """
    return cost / min(compile_share(fusable), GAIN * max(fusable, 1e-6))


def break_even(cost_seconds: float, plain: float, compiled: float, update: int, size: int) -> int | None:
    """The update at which a compile has paid for itself, `size` micro-batches each; None where it never does."""
    saved = (plain - compiled) * size
    return update + math.ceil(cost_seconds / saved) if saved > 0 else None


def budget(cost: float, fusable: float, left_seconds: float, waits: bool) -> float:
    """The seconds after which a worker of a compile guessed at `cost` seconds is given up."""
    return max(compile_share(fusable) * left_seconds, (WAITING_PATIENCE if waits else PATIENCE) * cost)


def repeats(left: int) -> int:
    """Timed steps of either side when a compiled plan is judged: well under 1 % of what is left, 2 to 5."""
    return min(max(left // 300, REPEATS), 5)


def affordable(candidates: Sequence[Plan], step: float, left: int, spent: float = 0.0) -> list[Plan]:
    """As many candidates as 2 % of what is left pays for; the plain step has to be timed beside them."""
    budget = TRIAL_SHARE * left * step - spent - REPEATS * step
    return list(candidates[: max(int(budget // ((1 + REPEATS) * EXPECTED * step)), 0)])
