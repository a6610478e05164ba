"""The speed plan: what there is to choose, and when a measurement is enough to choose it. Pure; measures nothing.

A plan is a precision, a memory layout and a scope of compile, with CUDA graphs or without. A candidate is worth a trial
only while its cost can still be won back in what is left of the run, and wins only by more than the spread of the
timings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

TOLERANCE = {"fp32": 1e-3, "host": 1e-3, "fp16": 2e-2, "bf16": 8e-2}  # relative difference of the same batch's loss
RANDOM_RANGES = 3.0  # of the losses seen of either plan, where dropout makes them differ
SCOPES = ("eager", "regional", "whole", "features")


@dataclass(frozen=True)
class Plan:
    """What runs. `host` leaves a thing as the host has it; `compile` is eager, regional, whole or features."""

    precision: str = "host"
    memory_format: str = "host"
    compile: str = "eager"
    cuda_graphs: bool = False

    @property
    def name(self) -> str:
        """As the report and the plan file show it."""
        parts = [part for part in (self.precision, self.memory_format) if part != "host"]
        if self.compile != "eager":
            parts.append(f"{self.compile} compile")
        if self.cuda_graphs:
            parts.append("CUDA graphs")
        return " + ".join(parts) or "host"

    @property
    def eager(self) -> Plan:
        """The same without compile."""
        return replace(self, compile="eager", cuda_graphs=False)

    def as_dict(self) -> dict[str, Any]:
        """The fields; CUDA graphs only where there are some, so that earlier releases read what has none."""
        return {name: value for name, value in asdict(self).items() if name != "cuda_graphs" or value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Raises ValueError on what is no mapping, and on an unknown field or value."""
        if not isinstance(data, Mapping):
            raise ValueError(f"{data!r} is no plan: expected its fields")
        allowed = {
            "precision": ("host", "fp32", "bf16", "fp16"),
            "memory_format": ("host", "channels_last"),
            "compile": SCOPES,
            "cuda_graphs": (False, True),
        }
        for name, value in data.items():
            if value not in allowed.get(name, ()):
                raise ValueError(f"{name}={value}: allowed are {allowed.get(name, tuple(allowed))}")
        plan = cls(**data)
        if plan.cuda_graphs and plan.compile == "eager":
            raise ValueError("cuda_graphs=True: of compiled code only, and compile=eager")
        return plan


@dataclass
class Timing:
    """Seconds of a candidate's timed steps and of the `first`, untimed one; its losses on the same batch.

    Losses of one plan differ where the model draws random numbers (dropout).
    """

    plan: Plan
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first: float = 0.0

    @property
    def middle(self) -> float:
        """Median seconds of a step."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Median distance from the median: of two steps half their difference, and deaf to a single slow one."""
        return median(abs(taken - self.middle) for taken in self.seconds)

    @property
    def loss(self) -> float:
        """Median loss on the same batch; NaN where none was seen."""
        return median(self.losses) if self.losses else math.nan

    @property
    def loss_range(self) -> float:
        """How far apart the losses of equal steps were."""
        return max(self.losses) - min(self.losses)

    def beats(self, other: Timing) -> bool:
        """Faster by more than both spreads: noise decides nothing."""
        return self.middle + self.spread < other.middle - other.spread

    def agrees(self, other: Timing) -> bool:
        """The loss of the same batch is the same, to the candidate's precision and what random numbers change."""
        noise = RANDOM_RANGES * (self.loss_range + other.loss_range)
        return abs(self.loss - other.loss) <= TOLERANCE[self.plan.precision] * abs(other.loss) + noise

    def as_dict(self) -> dict[str, Any]:
        """As a row of the report's candidates."""
        return {
            "plan": self.plan.name,
            "step_seconds_median": self.middle,
            "spread_seconds": self.spread,
            "first_step_seconds": self.first or None,
            "loss": self.loss if math.isfinite(self.loss) else None,  # JSON has no NaN
        }
