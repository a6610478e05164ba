"""What a run begins with, and the file that says what it ran: `plan=FILE` runs that again, without a trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeInt

from plugins.config import AccelConfig
from plugins.core.autotune.json_record import AnyPlan, Record
from plugins.core.checkpoint.atomic_file import write_atomically
from plugins.core.plan import Plan
from plugins.core.step.precision import Unsupported, resolve
from plugins.errors import AccelError

PLAN_NAME = "accel_plan.json"


class PlanError(AccelError):
    """A plan file that is none; the message is one line that names it."""


@dataclass
class Switch:
    """From this update on, this plan."""

    update: int
    plan: Plan

    def as_dict(self) -> dict[str, Any]:
        """As a JSON value, for the plan file and for checkpoints."""
        return {"update": self.update, "plan": self.plan.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Switch:
        """What `as_dict` gave."""
        return cls(int(data["update"]), Plan.from_dict(data["plan"]))


class _GivenSwitch(Record):
    update: NonNegativeInt
    plan: AnyPlan


class _PlanFile(Record):
    schema_: Literal[1] = Field(1, alias="schema")
    start: AnyPlan
    switches: list[_GivenSwitch]


@dataclass(frozen=True)
class Start:
    """What a run begins with: the plan, what is left open to measure, and the switches of a plan file."""

    plan: Plan = field(default_factory=Plan)
    open_fields: frozenset[str] = frozenset()
    switches: tuple[Switch, ...] = ()

    @property
    def precision(self) -> str:
        """To begin with: `host`, `fp32`, `bf16` or `fp16`."""
        return self.plan.precision

    @property
    def memory_format(self) -> str:
        """To begin with: `host` or `channels_last`."""
        return self.plan.memory_format

    @property
    def in_fp16(self) -> bool:
        """Whether it runs in fp16, now or later: gradients then need a scale."""
        return any(plan.precision == "fp16" for plan in (self.plan, *(switch.plan for switch in self.switches)))

    @classmethod
    def of(cls, config: AccelConfig, device: torch.device) -> Start:
        """Raises precision.Unsupported on a precision that the device cannot train in, PlanError on a bad plan file.

        A bad one is also one that contradicts a precision or a layout that the settings fix.

        Several ranks measure nothing: they would have to agree on it.
        """
        measures = config.plan == "auto" and not (dist.is_initialized() and dist.get_world_size() > 1)
        switches = read_switches(config.plan) if isinstance(config.plan, Path) else None
        precision: str = config.precision
        for switch in switches or ():
            _agrees(switch, config)
            try:
                resolve(switch.plan.precision, device)
            except Unsupported as error:
                raise PlanError(f"plan={config.plan}: from update {switch.update} on, {error}") from None
        if precision == "auto" and (measures or switches is not None):
            precision = "host"  # a file without switches is of a run in which nothing won
        layout = "host" if config.memory_format == "auto" else config.memory_format
        settings = {"precision": config.precision, "memory_format": config.memory_format, "compile": config.compile}
        still_open = frozenset(name for name, value in settings.items() if value == "auto") if measures else frozenset()
        return cls(Plan(resolve(precision, device), layout), still_open, tuple(switches or ()))


def _agrees(switch: Switch, config: AccelConfig) -> None:
    """Raises PlanError where the settings fix a precision or a layout, and the file says another."""
    for name in ("precision", "memory_format"):
        fixed, said = getattr(config, name), getattr(switch.plan, name)
        if name in config.model_fields_set and fixed not in ("auto", said):
            raise PlanError(
                f"plan={config.plan}: says {name}={said} from update {switch.update} on, which contradicts "
                f"{name}={fixed}: leave one of them out"
            )


def check_plan_file(config: AccelConfig) -> None:
    """Refuse a plan file that cannot be read, before a run begins or writes.

    Args:
        config: its `plan` may name a file.

    Raises:
        PlanError
    """
    if isinstance(config.plan, Path):
        read_switches(config.plan)


def read_switches(path: Path) -> list[Switch]:
    """The switches of a plan file.

    Raises:
        PlanError
    """
    try:
        given = _PlanFile.read(path)
    except OSError as error:
        raise PlanError(f"plan={path}: {error.strerror or error}; expected a plan file that a run wrote") from None
    except ValueError as error:
        raise PlanError(f"plan={path}: not a plan file: {error}") from None
    start, switches = given.start, [Switch(s.update, s.plan) for s in given.switches]
    first = [Switch(0, start)] if start != Plan() and not any(s.update == 0 for s in switches) else []
    return sorted([*first, *switches], key=lambda s: s.update)


def write_switches(folder: Path, start: Plan, switches: Sequence[Switch]) -> Path:
    """Write `accel_plan.json`: the plan at the start, and from which update on another one held."""
    data = {
        "schema": 1,
        "start": start.as_dict(),
        "switches": [switch.as_dict() for switch in switches],
    }
    text = json.dumps(data, indent=2)
    write_atomically(folder / PLAN_NAME, lambda file: file.write(text.encode()))
    return folder / PLAN_NAME
