"""Precisions and memory layouts, tried on the batch at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from plugins.core.autotune import cost_model
from plugins.core.autotune.paired_comparison import Owner
from plugins.core.autotune.timing import WindowStart, time_in_turn
from plugins.core.compile.decision import TuningOutcome, TuningResult
from plugins.core.plan import Plan, Timing


@dataclass(frozen=True)
class LayoutTrial:
    """What the trial of layouts came to.

    Attributes:
        outcome: which of them is to run, and why.
        tried: how many were.
        timings: the plan in force first; none where it failed.
        best: the fastest that wins by more than the spread; None to stay with the plan in force.
    """

    outcome: TuningOutcome = field(default_factory=TuningOutcome)
    tried: int = 0
    timings: list[Timing] = field(default_factory=list)
    best: Timing | None = None


def try_layouts(
    owner: Owner,
    device: torch.device,
    window_start: WindowStart,
    plan: Plan,
    wanted: Sequence[Plan],
    step_seconds: float,
) -> LayoutTrial:
    """Time the `plan` in force and as many of those `wanted` as what is left of the run pays for.

    Args:
        owner: the run that is left untouched, and is told.
        device: of the model.
        window_start: the batch at hand, and how much is left.
        plan: in force.
        wanted: the most promising first.
        step_seconds: of a micro-batch.

    Raises:
        NotFinite: this batch judges nothing.
    """
    tried = cost_model.affordable(wanted, step_seconds, window_start.left)
    if not tried:
        why = f"{window_start.left} micro-batches are left: too few to win a trial back"
        return LayoutTrial(TuningOutcome(TuningResult.TOO_SHORT, why) if wanted else TuningOutcome())
    names = ", ".join(candidate.name for candidate in tried)
    owner.progress(f"trying {len(tried)} of {len(wanted)} plans on this batch: {names}")
    with owner.untouched():
        try:
            timings = time_in_turn(window_start.trial, [plan, *tried], device, owner.clear_gradients, owner.warn)
        finally:
            window_start.trial.apply(plan.precision, plan.memory_format)
    if not timings:
        return LayoutTrial(tried=len(tried))
    plain = timings[0]
    for timing in timings[1:]:
        if not timing.agrees(plain):
            owner.warn(f"plan {timing.plan.name}: dropped, its loss {timing.loss:.6g} is not {plain.loss:.6g}")
    best = cost_model.fastest(plain, timings[1:])
    if best is plain:
        why = "no plan won by more than the spread of the timings"
        return LayoutTrial(TuningOutcome(TuningResult.KEPT, why), len(tried), timings)
    why = f"{best.plan.name}: {best.middle:.3g} s a step against {plain.middle:.3g} s"
    return LayoutTrial(TuningOutcome(TuningResult.WON, why), len(tried), timings, best)
