"""What to give up, in order, where not even the smallest micro-batch fits: each step is measured, and kept if it helps.

The mildest come first: they cost time and nothing of what is learnt (a smaller micro-batch, accumulation), then a
little precision (autocast), time again (activation checkpointing), and then what is learnt (freezing) or how.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.errors import AccelError
from plugins.find_batch.search import Measurement, Outcome

AUTOCAST = "autocast"
HELPS = 0.99  # of the peak before: a step that takes off less is not kept


@dataclass(frozen=True)
class Step:
    """One thing to give up.

    Attributes:
        name: what it is.
        settings: of accel.
        checks: what a trial's child does in the user's place, see `plugins.trial_run.probes`.
        arguments: laid over the command, by the host's name.
        advice: what the user has to do where neither settings nor arguments do it.
        needs: distributions of which one has to be installed.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        """Whether nothing that it needs is installed."""
        return bool(self.needs) and not any(importlib.util.find_spec(name) for name in self.needs)


STEPS = (
    Step("the smallest micro-batch", {"accumulate": 1}),
    Step("accumulation", {"accumulate": 2}),
    Step(AUTOCAST, {"precision": "bf16"}),
    Step("activation checkpointing", {"checkpointing": "on"}),
    Step(
        "freezing",
        checks=("freeze",),
        arguments={"ultralytics": "freeze=10", "easyocr": "freeze_FeatureExtraction=True"},
        advice="freeze the first half of the model: parameter.requires_grad_(False) before the optimizer is built",
    ),
    Step(
        "8-bit optimizer states",
        checks=("eight_bit",),
        advice="an 8-bit optimizer: bitsandbytes.optim.AdamW8bit, torchao.optim.AdamW8bit, or optim='adamw_bnb_8bit'",
        needs=("bitsandbytes", "torchao"),
    ),
    Step(
        "activation memory budget of 0.5 under compile",
        {"compile": "on"},
        checks=("activation_budget",),
        advice="before the first update: torch._functorch.config.activation_memory_budget = 0.5",
    ),
)


@dataclass(frozen=True)
class Tried:
    """A step, and what was measured with it and with those kept before it.

    Attributes:
        step: which.
        measured: None where it cannot be taken here.
        kept: whether the answer needs it.
        why: it was not measured.
    """

    step: Step
    measured: Measurement | None
    kept: bool
    why: str = ""


MeasureStep = Callable[[Sequence[Step]], Measurement]


def rescue(
    measure: MeasureStep, limit_gib: float, steps: Sequence[Step] = STEPS, pointless: Mapping[str, str] | None = None
) -> list[Tried]:
    """Take the steps one after the other until the training fits.

    Args:
        measure: trains at the smallest micro-batch with these steps taken.
        limit_gib: what it has to fit into.
        steps: in the order in which they are tried.
        pointless: why a step, by its name, is nothing for this device.

    Returns:
        All that were tried; it fits if the last one does. A step that takes nothing off is left out of the later ones,
        except the first two, which are how the micro-batch is made small.
    """
    tried: list[Tried] = []
    kept: list[Step] = []
    peak: float | None = None
    for step in steps:
        why = f"needs {' or '.join(step.needs)}" if step.missing else (pointless or {}).get(step.name)
        if why is not None:
            tried.append(Tried(step, None, kept=False, why=why))
            continue
        try:
            found = measure([*kept, step])
        except AccelError as error:
            if not kept:  # nothing runs at all
                raise
            tried.append(Tried(step, None, kept=False, why=str(error)))
            continue
        sized = "accumulate" in step.settings
        helps = sized or _helps(found, peak)
        tried.append(Tried(step, found, helps))
        if helps:
            kept.append(step)
            peak = found.peak_gib if found.peak_gib is not None else peak
        if found.fits(limit_gib) and (not sized or step.settings["accumulate"] > 1):
            break
    return tried


def _helps(found: Measurement, before: float | None) -> bool:
    if found.outcome is not Outcome.DONE or found.peak_gib is None:
        return False
    return before is None or found.peak_gib < before * HELPS


def taken(steps: Sequence[Step]) -> dict[str, Any]:
    """The settings of all these steps; a later one wins."""
    return {name: value for step in steps for name, value in step.settings.items()}
