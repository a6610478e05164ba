"""Chooses the speed plan of one run, by measuring it on the run's own batches, and puts everything back.

It is asked at the start of every window, before the forward, with nothing accumulated yet. First the run's own steps
are timed. Then layouts and precisions are tried on the batch at hand, forward and backward only: weights and optimizer
are never touched. A compile happens in a worker beside the run, which changes over if it then wins on that batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plugins.core.autotune import cost_model
from plugins.core.autotune.background_compile import BackgroundCompile, CompileFindings
from plugins.core.autotune.cached_work import CachedWork
from plugins.core.autotune.layouts import try_layouts
from plugins.core.autotune.paired_comparison import Owner
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.autotune.plan_file import Start, Switch
from plugins.core.autotune.timing import NotFinite, WindowStart
from plugins.core.compile.decision import (
    CompileOutcome,
    CompileResult,
    CompileStage,
    TuningOutcome,
    TuningResult,
    TuningStage,
)
from plugins.core.compile.manager import OWNED, CompileManager
from plugins.core.compile.worker import WorkerState
from plugins.core.plan import Plan, Timing
from plugins.core.telemetry.report import CompileFacts, SpeedFacts

PLAIN_STEPS = 3  # of the run's own, after the first, before anything is tried
RESUMED = "the plan of the run that is resumed"
UNFIT_BATCHES = 3  # whose loss is not finite, before trials are given up


class Tuner:
    """One run's plan.

    Attributes:
        plan: what is in force; `switches`: from which update on what was.
        state: what the tuning does now.
        outcome: why the layout and precision are what they are; `compilation.decision` says it of the compile.
    """

    def __init__(
        self,
        owner: Owner,
        model: nn.Module,
        device: torch.device,
        start: Start,
        memory: PlanCache | None,
        compilation: CompileManager,
    ) -> None:
        self.owner, self.model, self.device, self.compilation = owner, model, device, compilation
        self.start = self.plan = start.plan
        self.open_fields = start.open_fields
        self.cached = CachedWork(memory if start.open_fields else None, model, device, start, compilation)
        self.background = BackgroundCompile(owner, device, compilation)
        self.given = [self._allowed(switch) for switch in start.switches]
        self.switches: list[Switch] = []
        self.timings: list[Timing] = []
        self.state = TuningStage.TIMING if start.open_fields else TuningStage.DONE
        self.outcome = TuningOutcome()
        self._layouts = cost_model.layouts(model, device, start.plan, start.open_fields)
        self._tried = 0  # layouts
        self._layout_known = False
        self._plain: deque[float] = deque(maxlen=16)
        self._steps = self._unfit = 0
        self._recalled_step = 0.0  # seconds
        if compilation.owned:  # a candidate would be compiled anew, by the owner's way, in the run itself
            self.measure_nothing(OWNED.reason)
        if self.measured and compilation.decision.stage is CompileStage.WAITING:
            compilation.decision.now(CompileStage.EAGER)

    # -- the run's own steps --------------------------------------------------------------------------------------

    def stepped(self, seconds: float) -> None:
        """A micro-batch of the run took this long; the first, which warms up, does not count."""
        self._steps += 1
        if self._steps > 1:
            self._plain.append(seconds)

    @property
    def step_seconds(self) -> float:
        """Median seconds of one of the run's own micro-batches, lately; 0 where none was timed."""
        return median_high(self._plain) if self._plain else 0.0

    @property
    def measured(self) -> bool:
        """Whether nothing is tried any more."""
        return self.state is TuningStage.DONE

    @property
    def waits(self) -> bool:
        """Whether a window's start may change anything."""
        return not self.measured or bool(self.given) or self._fell

    def at_window(self, window_start: WindowStart) -> None:
        """At a window's first micro-batch, outside autocast: recall, try or switch, as far as the run has come."""
        if self._fell:
            self._fall(window_start)
        while self.given and window_start.update >= self.given[0].update:
            self._switch(window_start, self.given.pop(0).plan)
        if self.state is TuningStage.TIMING and not self.cached.key and window_start.shape:  # none where a loop resumes
            self._recall(window_start)
        try:
            if self.state is TuningStage.TIMING and len(self._plain) >= PLAIN_STEPS:
                if not self._layout_known:
                    self._try_layouts(window_start)
                self._begin_compile(window_start)
                if not self.background.waits:  # a worker beside the run is asked from the next window on
                    return
            if self.state is TuningStage.COMPILING:
                self._change_over(window_start)
        except NotFinite:  # another batch may do; after a few, nothing is tried, and nothing of it is remembered
            self._unfit += 1
            if self._unfit == UNFIT_BATCHES:
                self.measure_nothing(f"the loss was not finite on {self._unfit} batches")

    def due(self, update: int) -> Plan:
        """What is to run at this update by the switches that were given."""
        return next((switch.plan for switch in reversed(self.given) if switch.update <= update), self.plan)

    @property
    def may_compile(self) -> bool:
        """Whether compiled code runs, or may run later."""
        if self.compilation.active or any(switch.plan.compile != "eager" for switch in self.given):
            return True
        return "compile" in self.open_fields and not cost_model.cannot_gain(self.compilation.modules()[0], self.device)

    def _allowed(self, switch: Switch) -> Switch:
        """A plan file compiles nothing at `compile=off`."""
        if switch.plan.compile == "eager" or self.compilation.config.compile != "off":
            return switch
        why = CompileOutcome(CompileResult.ASKED, "compile=off, which a plan file does not overrule")
        self.compilation.decision.now(CompileStage.OFF, why)
        return replace(switch, plan=switch.plan.eager)

    def measure_nothing(self, why: str) -> None:
        """No trial from now on; switches that were given are made all the same."""
        if self.state is TuningStage.TIMING:
            self.outcome = TuningOutcome(TuningResult.NO_TRIAL, f"no trial: {why}")
        if not self.measured and "compile" in self.open_fields:
            self.background.end()
            self.background.stays_eager(CompileOutcome(CompileResult.NO_TRIAL, f"no trial: {why}"))
        self.state = TuningStage.DONE

    def _switch(self, window_start: WindowStart, plan: Plan) -> None:
        """Run this plan from now on, or what of it can be."""
        if (plan.compile, plan.cuda_graphs) != (self.plan.compile, self.plan.cuda_graphs):
            plan = self.compilation.run(plan)
            self.owner.clear_gradients()  # preallocated ones stay only with CUDA graphs
        window_start.trial.apply(plan.precision, plan.memory_format)
        self._now_runs(window_start.update, plan)

    def _now_runs(self, update: int, plan: Plan) -> None:
        changes = plan != self.plan
        self.plan = plan
        if changes and not (self.switches and self.switches[-1].plan == plan):  # what a resumed run goes on with
            self.switches.append(Switch(update, plan))

    @property
    def _fell(self) -> bool:
        """The compiler failed, or passed its budget of graphs, and the run went back to eager."""
        return self.plan.compile != "eager" and not self.compilation.decision.running

    def _fall(self, window_start: WindowStart) -> None:
        self.owner.clear_gradients()
        self._now_runs(window_start.update, self.plan.eager)
        outcome = self.compilation.decision.outcome
        self.background.findings = CompileFindings(outcome.reason, settled=not outcome.retryable)
        self._remember()

    # -- what earlier runs learnt ---------------------------------------------------------------------------------

    def _recall(self, window_start: WindowStart) -> None:
        """Start with what an earlier run of the same work learnt, as far as it went."""
        found = self.cached.recall(window_start, self._layouts)
        if found is None:
            return
        findings, self._tried, self._layout_known = found.compile, found.tried, True
        self.background.findings, self._recalled_step = findings, found.step_seconds
        if found.plan.compile != "eager":
            saved = findings.saved_seconds
            self.background.break_even = cost_model.break_even(
                findings.warm_seconds, saved, 0.0, window_start.update, window_start.size
            )
        self.outcome = TuningOutcome(TuningResult.REMEMBERED, "remembered from an earlier run")
        if findings.settled or "compile" not in self.open_fields:
            self.state = TuningStage.DONE
        if findings.reason:
            stage = CompileStage.EAGER if self.measured else CompileStage.WAITING
            known = CompileOutcome(CompileResult.REMEMBERED, findings.reason, not findings.settled)
            self.compilation.decision.now(stage, known)
        self._switch(window_start, found.plan)

    def _remember(self) -> None:
        step = self.step_seconds or self._recalled_step
        self.cached.keep(self.plan, self._tried, step, self.background.findings, self.timings)

    # -- layouts and precisions -----------------------------------------------------------------------------------

    def _try_layouts(self, window_start: WindowStart) -> None:
        """On the batch at hand; the fastest runs from now on, if it wins."""
        found = try_layouts(self.owner, self.device, window_start, self.plan, self._layouts, self.step_seconds)
        self.outcome, self._tried, self.timings = found.outcome, found.tried, found.timings
        if found.best is not None:
            faster = found.best.middle / found.timings[0].middle
            self._switch(window_start, found.best.plan)
            self._plain = deque([s * faster for s in self._plain], maxlen=16)

    # -- compile --------------------------------------------------------------------------------------------------

    def _begin_compile(self, window_start: WindowStart) -> None:
        under_way = "compile" in self.open_fields and self.background.begin(window_start, self.plan, self.step_seconds)
        self.state = TuningStage.COMPILING if under_way else TuningStage.DONE
        if not under_way:
            self._remember()

    def _change_over(self, window_start: WindowStart) -> None:
        """When the code is ready, run it if it wins on the batch at hand."""
        state = self.background.poll()
        if state is WorkerState.RUNNING:
            return
        if state is WorkerState.READY and (twin := self.background.judge(window_start, self.plan)) is not None:
            self._now_runs(window_start.update, twin)
        self.state = TuningStage.DONE
        self.timings += self.background.timings
        self._remember()

    # -- a run's end and its going on -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plan in force, the switches to it, and whether the run has measured."""
        switches = [switch.as_dict() for switch in self.switches]
        return {"plan": self.plan.as_dict(), "switches": switches, "measured": self.measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The run's counts have been put back before. Earlier releases saved no switches."""
        switches = [Switch.from_dict(switch) for switch in state.get("switches", [])]
        plan = Plan.from_dict(state.get("plan", {}))
        self.resume(plan, self.owner.updates, state.get("measured", True), switches)

    def resume(self, plan: Plan, update: int, measured: bool = True, switches: Sequence[Switch] = ()) -> None:
        """A resumed run goes on under the plan that was in force, at its next window. `switches` were made before.

        Nothing is tried again; a run that was saved before it had `measured` does so now. What the settings fix, they
        fix here too; a plan file fixes everything.
        """
        if measured and self.open_fields:
            self.state, self.outcome = TuningStage.DONE, TuningOutcome(TuningResult.RESUMED, RESUMED)
            if self.compilation.decision.undecided:
                self.compilation.decision.now(CompileStage.EAGER, CompileOutcome(CompileResult.RESUMED, RESUMED))
        self.switches[:] = switches
        if due := [switch.plan for switch in self.given if switch.update <= update]:
            self.given[: len(due)] = [Switch(update, due[-1])]
        fields = self.open_fields | ({"cuda_graphs"} if "compile" in self.open_fields else set())
        plan = replace(self.plan, **{name: getattr(plan, name) for name in fields})
        if plan != self.plan:
            self.given = [Switch(update, plan)]

    def sum_up(self, speed: SpeedFacts, facts: CompileFacts) -> None:
        """Write the plan, its reasons and every candidate's figures into the report."""
        plan = self.plan.eager if self._fell else self.plan
        speed.plan, speed.precision, speed.memory_format = plan.name, plan.precision, plan.memory_format
        speed.reason = self.outcome.reason or self._unmeasured()
        speed.candidates = [timing.as_dict() for timing in self.timings]
        speed.switches = [{"update": s.update, "plan": s.plan.name} for s in self.switches]
        facts.break_even_update = self.background.break_even
        self.compilation.decision.write("" if self.state is TuningStage.COMPILING else self._unmeasured())

    def _unmeasured(self) -> str:
        """Why it runs as it does, where no measurement says so."""
        plan = self.compilation.config.plan
        if isinstance(plan, Path):
            ahead = f", which is to switch at update {self.given[0].update}" if self.given else ""
            return f"as plan={plan} says{ahead}"
        if plan == "off":
            return "plan=off measures nothing"
        if dist.is_initialized() and dist.get_world_size() > 1:
            return "several ranks measure nothing: they would have to agree on it"
        if self.state is TuningStage.TIMING:
            asked = self.cached.key or not self._steps
            return "the run ended before anything was measured" if asked else "the loop asked for no trial"
        return "there is no other precision or layout to try"

    def end(self) -> None:
        """The run is over: stop what compiles beside it."""
        self.background.end()
