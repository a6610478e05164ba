"""The speed plan: what there is to choose, and when a measurement is enough to choose it. Pure; measures nothing.

A plan is a precision, a memory layout and a scope of compile. A candidate is worth a trial only while its cost can
still be won back in what is left of the run, and wins only by more than the spread of the timings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from plugins.core.compile import regions
from plugins.core.precision import bf16_is_fast

TRIAL_SHARE = 0.02  # of the time that is left: what trials may cost in all
COMPILE_SHARE = 0.10  # of the time that is left: what a compile that is likely to pay may cost
LIKELY_SHARE = 0.35  # of a step outside matrix products and convolutions: from there a compile is likely to pay
REPEATS = 2  # timed steps a candidate, after one that is not timed
EXPECTED = 0.6  # of the plain step: what a candidate worth a trial is expected to take
HOPELESS = 1.5  # times the plain step: a candidate whose first step takes longer is not timed further
TOLERANCE = {"fp32": 1e-3, "host": 1e-3, "fp16": 2e-2, "bf16": 8e-2}  # relative difference of the same batch's loss
SECONDS_A_LAYER = {"cpu": 0.6, "cuda": 0.4}  # cold compile, forward and backward, of one leaf module


@dataclass(frozen=True)
class Plan:
    """What runs. `host` leaves a thing as the host has it; `compile` is eager, regional or whole."""

    precision: str = "host"
    memory_format: str = "host"
    compile: str = "eager"

    @property
    def name(self) -> str:
        parts = [part for part in (self.precision, self.memory_format) if part != "host"]
        if self.compile != "eager":
            parts.append(f"{self.compile} compile")
        return " + ".join(parts) or "host"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Raises ValueError on an unknown field or value."""
        allowed = {
            "precision": ("host", "fp32", "bf16", "fp16"),
            "memory_format": ("host", "channels_last"),
            "compile": ("eager", "regional", "whole"),
        }
        for name, value in data.items():
            if value not in allowed.get(name, ()):
                raise ValueError(f"{name}={value}: allowed are {allowed.get(name, tuple(allowed))}")
        return cls(**data)


@dataclass
class Timing:
    """Seconds of a candidate's timed steps, and its loss on the same batch."""

    plan: Plan
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    @property
    def middle(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / 2

    def beats(self, other: Timing) -> bool:
        """Faster by more than both spreads: noise decides nothing."""
        return self.middle + self.spread < other.middle - other.spread

    def agrees(self, other: Timing) -> bool:
        """The loss of the same batch is the same, to the tolerance of the candidate's precision."""
        off = abs(self.loss - other.loss)
        return off <= TOLERANCE[self.plan.precision] * max(abs(other.loss), 1e-6)

    def as_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.name,
            "step_seconds_median": self.middle,
            "spread_seconds": self.spread,
            "loss": self.loss,
        }


def layouts(model: nn.Module, device: torch.device, start: Plan, open_fields: frozenset[str]) -> list[Plan]:
    """Plans without compile that are worth trying here, the most promising first."""
    convolves = any(isinstance(m, (nn.Conv2d, nn.Conv3d)) for m in model.modules())
    precisions = ["bf16"] if "precision" in open_fields and bf16_is_fast(device) else []
    formats = ["channels_last"] if "memory_format" in open_fields and convolves else []
    both = [(p, f) for p in precisions for f in formats]
    single = [(start.precision, f) for f in formats] + [(p, start.memory_format) for p in precisions]
    return [Plan(p, f) for p, f in both + single if Plan(p, f) != start]


def scope(model: nn.Module) -> str:
    """`regional` where blocks repeat (each compiled once), else `whole`."""
    return "regional" if regions(model) else "whole"


def compile_seconds(model: nn.Module, device: torch.device) -> float:
    """A guess of the cold compile's seconds, from the leaf modules of what would be compiled.

    Measured on 2 CPU cores: 146 s for YOLOv8n whole (about 225 leaves), 35 s for a 6-layer BERT.
    """
    blocks = regions(model)
    unique = {(type(b), tuple(tuple(p.shape) for p in b.parameters())): b for b in blocks}
    parts = list(unique.values()) or [model]
    leaves = sum(1 for part in parts for m in part.modules() if not list(m.children()))
    return leaves * SECONDS_A_LAYER.get(device.type, 0.6)


def worth_compiling(model: nn.Module, device: torch.device, fusable: float, left_seconds: float) -> tuple[bool, str]:
    """Whether a compile should be tried with this much left, and why.

    `fusable` is the share of a step spent outside matrix products and convolutions: the most that fusing can save.
    """
    cost = compile_seconds(model, device)
    if device.type == "cpu" and any(isinstance(m, nn.Conv2d) for m in model.modules()):
        return False, "convolutions gained nothing from compile on a CPU"
    gain = 0.6 * fusable * left_seconds  # measured: a block of pointwise work gained about 0.6 of its fusable share
    share = COMPILE_SHARE if fusable >= LIKELY_SHARE else TRIAL_SHARE
    if cost > share * left_seconds:
        return False, f"a compile of about {cost:.0f} s is over {share:.0%} of the {left_seconds:.0f} s that are left"
    if cost > gain:
        return False, f"a compile of about {cost:.0f} s cannot be won back: at most {gain:.0f} s to gain"
    return True, ""


def break_even(cost_seconds: float, plain: float, compiled: float, update: int, micro_batches: int) -> int | None:
    """The update at which a compile has paid for itself; None where it never does."""
    saved = (plain - compiled) * micro_batches
    return update + -(-int(cost_seconds * 1e6) // max(int(saved * 1e6), 1)) if saved > 0 else None


def affordable(candidates: Sequence[Plan], step: float, left: int, spent: float = 0.0) -> list[Plan]:
    """As many candidates as 2 % of what is left pays for; the plain step has to be timed beside them."""
    budget = TRIAL_SHARE * left * step - spent - REPEATS * step
    return list(candidates[: max(int(budget // ((1 + REPEATS) * EXPECTED * step)), 0)])
