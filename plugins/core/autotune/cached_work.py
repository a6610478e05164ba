"""What earlier runs of the same work learnt, as a planner asks for it, and what this run adds.

The work is a model's structure, the batch's shape, the device, the versions and the settings that bear on the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plugins.core.autotune import cost_model
from plugins.core.autotune.background_compile import CompileFindings
from plugins.core.autotune.plan_cache import CachedPlan, PlanCache, fingerprint
from plugins.core.autotune.plan_file import Start
from plugins.core.autotune.timing import WindowStart
from plugins.core.compile.manager import CompileManager
from plugins.core.plan import Plan, Timing


class CachedWork:
    """One work's entry in the cache folder. `key` is its name there, known from the first window on.

    Args:
        memory: None remembers nothing.
    """

    def __init__(
        self,
        memory: PlanCache | None,
        model: nn.Module,
        device: torch.device,
        start: Start,
        compilation: CompileManager,
    ) -> None:
        self.memory, self.model, self.device, self.start, self.compilation = memory, model, device, start, compilation
        self.key = ""

    def recall(self, window_start: WindowStart, layouts: Sequence[Plan]) -> CachedPlan | None:
        """What was learnt, with the plan as this run can use it; None where it has to measure.

        Args:
            window_start: the first window of the run, for its shape and what is left.
            layouts: plans without compile that this run would try.
        """
        self.key = fingerprint(self.model, self._bounded(window_start.shape), self.device, self._settings(window_start))
        if self.memory is None:
            return None
        self.memory.writable()  # a folder that is not says so now, not when the run has nothing left to learn
        found = self.memory.find(self.key, self._offered(layouts))
        if found is None or len(cost_model.affordable(layouts, found.step_seconds, window_start.left)) > found.tried:
            return None  # a run that is longer than the one that learnt it can try more
        findings = found.compile
        if found.plan.compile != "eager" and not self.memory.has_code(found.code):
            found.plan = found.plan.eager
            findings.settled = False  # code went away: compile it again, beside
        elif found.plan.compile != "eager" and findings.saved_seconds * window_start.left < findings.warm_seconds:
            found.plan = found.plan.eager
            findings.reason = f"even from a warm cache, {findings.warm_seconds:.1f} s, compile cannot be won back"
        return found

    def keep(self, plan: Plan, tried: int, step: float, findings: CompileFindings, timings: Sequence[Timing]) -> None:
        """Only what was measured is remembered: a run too short to measure has learnt nothing.

        Args:
            plan: in force.
            tried: how many layouts were.
            step: seconds of a micro-batch.
            findings: what is known of compiling it.
            timings: what was measured.
        """
        measured = timings or findings.settled or findings.fusable or findings.given_up_seconds
        if self.memory is None or not step or not measured:
            return
        self.memory.keep(
            self.key,
            {
                "plan": plan.as_dict(),
                "tried": tried,
                "step_seconds": step,
                "compile": findings.as_dict(),
                "code": self.memory.code() if plan.compile != "eager" else [],
                "candidates": [timing.as_dict() for timing in timings],
                "device": self.device.type,
                "torch": str(torch.__version__),
                "parameters": sum(p.numel() for p in self.model.parameters()),
            },
        )

    def _offered(self, layouts: Sequence[Plan]) -> set[Plan]:
        """Every plan that this run could come to by itself, on this device."""
        offered = {self.start.plan, *layouts}
        if "compile" not in self.start.open_fields:
            return offered
        modules, scope = self.compilation.modules()
        if cost_model.cannot_gain(modules, self.device):
            return offered
        ways = (False, True) if self.compilation.may_use_cuda_graphs else (False,)
        return offered | {replace(plan, compile=scope, cuda_graphs=way) for plan in offered for way in ways}

    def _bounded(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The shape with 0 for the dimensions that vary from batch to batch."""
        return tuple(0 if at in self.compilation.dims else n for at, n in enumerate(shape))

    def _settings(self, window_start: WindowStart) -> list[Any]:
        config = self.compilation.config
        compile_ = [config.compile_scope, config.compile_exclude, *self.compilation.arguments("whole").items()]
        return [window_start.trial.host_precision, self.start.plan.as_dict(), sorted(self.start.open_fields), compile_]
