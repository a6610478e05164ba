"""Chooses the speed plan of one run, by measuring it on the run's own batches, and puts everything back.

It is asked at the start of every window, before the forward, with nothing accumulated yet. First the run's own steps
are timed, which costs nothing. Then layouts and precisions are tried on the batch at hand, forward and backward only:
weights and optimizer are never touched, BatchNorm statistics, gradients and random state are put back. A compile
happens in a worker beside the run, which changes over when the code is ready, if it then wins on the batch at hand.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from plugins.core import plan as planning
from plugins.core.plan import Plan, Timing
from plugins.core.planfile import Start, Switch, write_switches
from plugins.core.precompile import Captured, Worker
from plugins.core.remember import Memory, fingerprint
from plugins.core.report import CompileFacts, SpeedFacts
from plugins.core.trial import Trial, fusable_share, time_steps

PLAIN_STEPS = 3  # of the run's own, after the first, before anything is tried


class Owner(Protocol):
    """What the planner needs of the session that owns it."""

    def compile_scope(self, scope: str) -> Sequence[nn.Module]: ...

    def uncompile(self) -> None: ...

    def untouched(self) -> Any: ...

    def warn(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...


class Planner:
    """One run's plan. `state`: `timing`, `compiling` or `done`; `reason` says why the plan is what it is."""

    def __init__(
        self,
        owner: Owner,
        model: nn.Module,
        device: torch.device,
        start: Start,
        memory: Memory | None,
        compile_arguments: Callable[[str], dict[str, Any]] = lambda scope: {},
        dims: Sequence[int] = (),
    ) -> None:
        self.owner, self.model, self.device = owner, model, device
        self.start = self.plan = start.plan
        self.open_fields = start.open_fields
        self.memory = memory if start.open_fields else None
        self.compile_arguments, self.dims = compile_arguments, tuple(dims)
        self.given = list(start.switches)
        self.switches: list[Switch] = []
        self.timings: list[Timing] = []
        self.state = "timing" if start.open_fields else "done"
        self.reason = ""
        self.compile_reason = ""
        self.break_even: int | None = None
        self.compile_seconds: dict[str, float] = {}
        self.spent = 0.0
        self._plain: deque[float] = deque(maxlen=16)
        self._seen = 0
        self._key = ""
        self._worker: Worker | None = None

    # -- the run's own steps ------------------------------------------------------------------------------------

    def stepped(self, seconds: float) -> None:
        """A micro-batch of the run took this long; the first, which warms up, does not count."""
        self._seen += 1
        if self._seen > 1:
            self._plain.append(seconds)

    @property
    def step_seconds(self) -> float:
        ordered = sorted(self._plain)
        return ordered[len(ordered) // 2] if ordered else 0.0

    # -- at a window's start ------------------------------------------------------------------------------------

    def at_window(self, trial: Trial, update: int, left: int, shape: tuple[int, ...]) -> None:
        """`left` micro-batches are to come, this window's included."""
        if self.given and update >= self.given[0].update:
            self._switch(trial, update, self.given.pop(0).plan)
        if self.state == "done":
            return
        if not self._key:
            self._key = fingerprint(self.model, shape, self.device, self.open_fields)
            if self._recall(trial, update, left):
                return
        if self.state == "timing" and len(self._plain) >= PLAIN_STEPS:
            self._try_layouts(trial, update, left)
            self._begin_compile(trial, left)
        elif self.state == "compiling":
            self._change_over(trial, update, left)

    def _recall(self, trial: Trial, update: int, left: int) -> bool:
        """Start with what an earlier run of the same work learnt."""
        found = self.memory.find(self._key) if self.memory is not None else None
        if found is None:
            return False
        try:
            plan = Plan.from_dict(found["plan"])
            saved, warm = float(found.get("saved_seconds", 0.0)), float(found.get("warm_seconds", 0.0))
        except (ValueError, TypeError, KeyError) as error:
            self.owner.warn(f"cache entry {self._key[:12]}: not usable ({error}); measuring anew")
            return False
        if plan.compile != "eager" and saved * left < warm:
            plan = Plan(plan.precision, plan.memory_format)
            self.compile_reason = f"even from a warm cache ({warm:.1f} s) compile cannot be won back in this run"
        self.state, self.reason = "done", "remembered from an earlier run"
        self.compile_reason = self.compile_reason or str(found.get("compile_reason", self.reason))
        if plan != self.plan:
            self._switch(trial, update, plan)
        return True

    def _switch(self, trial: Trial, update: int, plan: Plan) -> None:
        """Run this plan from now on."""
        if plan.compile != self.plan.compile:
            self.owner.uncompile()
            if plan.compile != "eager":
                self.owner.compile_scope(plan.compile)
        if (plan.precision, plan.memory_format) != (self.plan.precision, self.plan.memory_format):
            trial.apply(plan.precision, plan.memory_format)
        self.plan = plan
        self.switches.append(Switch(update, plan))

    # -- layouts and precisions ---------------------------------------------------------------------------------

    def _try_layouts(self, trial: Trial, update: int, left: int) -> None:
        wanted = planning.layouts(self.model, self.device, self.start, self.open_fields)
        tried = planning.affordable(wanted, self.step_seconds, left)
        if not tried:
            if wanted:
                self.reason = f"{left} micro-batches are left: too few to win a trial back"
            return
        began = time.perf_counter()
        self.owner.progress(
            f"trying {len(tried)} of {len(wanted)} plans on this batch: {', '.join(p.name for p in tried)}"
        )
        with self.owner.untouched():
            plain = self._time(trial, self.start, warm=False)
            best = plain
            for candidate in tried if plain is not None else []:
                trial.apply(candidate.precision, candidate.memory_format)
                timing = self._time(trial, candidate, hopeless=planning.HOPELESS * plain.middle)  # type: ignore[union-attr]
                if timing is not None and plain is not None and best is not None:
                    if not timing.agrees(plain):
                        self.owner.warn(
                            f"plan {candidate.name}: dropped, its loss {timing.loss:.6g} is not {plain.loss:.6g}"
                        )
                    elif timing.beats(plain) and timing.middle < best.middle:
                        best = timing
                trial.apply(self.plan.precision, self.plan.memory_format)
        self.spent += time.perf_counter() - began
        if best is None or plain is None or best is plain:
            self.reason = "no plan won by more than the spread of the timings"
            return
        self.reason = f"{best.plan.name}: {best.middle:.3g} s against {plain.middle:.3g} s a step"
        self._switch(trial, update, best.plan)

    def _time(self, trial: Trial, plan: Plan, warm: bool = True, hopeless: float = math.inf) -> Timing | None:
        timing = time_steps(self.model, self.device, trial, plan, self.owner.warn, warm, hopeless)
        if timing is not None:
            self.timings.append(timing)
        return timing

    # -- compile ------------------------------------------------------------------------------------------------

    def _begin_compile(self, trial: Trial, left: int) -> None:
        """Start a worker, where a compile is likely to be won back."""
        self.state = "done"
        if "compile" not in self.open_fields:
            self._remember()
            return
        seconds = left * self._now()
        likely, why = planning.worth_compiling(self.model, self.device, 1.0, seconds)
        if likely:
            scope = planning.scope(self.model)
            modules = planning.regions(self.model) if scope == "regional" else [self.model]
            with self.owner.untouched(), Captured(modules) as captured:
                fusable = fusable_share(self.model, self.device, trial)
            likely, why = planning.worth_compiling(self.model, self.device, fusable, seconds)
            if likely:
                share = planning.COMPILE_SHARE if fusable >= planning.LIKELY_SHARE else planning.TRIAL_SHARE
                likely, why = self._start_worker(trial, captured, share * seconds)
        if not likely:
            self.compile_reason = why
            self._remember()

    def _start_worker(self, trial: Trial, captured: Captured, budget: float) -> tuple[bool, str]:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.plan.precision)
        autocast = (self.device.type, dtype) if dtype is not None else getattr(trial, "autocast", None)
        try:
            self._worker = Worker(
                captured.calls, self.compile_arguments(planning.scope(self.model)), self.dims, autocast, budget
            )
        except Exception as error:
            return False, f"the model cannot be handed to a compile worker: {type(error).__name__}: {error}"
        self.state = "compiling"
        self.owner.progress(f"compiling beside the run ({len(captured.calls)} kinds of call, at most {budget:.0f} s)")
        return True, ""

    def _change_over(self, trial: Trial, update: int, left: int) -> None:
        """Poll the worker; when the code is ready, keep it if it wins on the batch at hand."""
        assert self._worker is not None
        standing = self._worker.poll()
        if standing == "running":
            return
        worker, self._worker, self.state = self._worker, None, "done"
        if standing != "ready":
            self.compile_reason = standing
            self.owner.warn(f"compile: {standing}; the run goes on eagerly")
            return
        scope = planning.scope(self.model)
        self.compile_seconds["cold"] = worker.seconds
        with self.owner.untouched():
            plain = self._time(trial, self.plan, warm=False)
            began = time.perf_counter()
            modules = self.owner.compile_scope(scope)
            candidate = Plan(self.plan.precision, self.plan.memory_format, scope)
            compiled = self._time(trial, candidate) if modules else None
            trial_seconds = time.perf_counter() - began
        if plain is None or compiled is None:
            self.owner.uncompile()
            self.compile_reason = self.compile_reason or "the compiled plan could not be timed"
            return
        warm = self.compile_seconds["warm"] = max(trial_seconds - planning.REPEATS * compiled.middle, 0.0)
        saved = plain.middle - compiled.middle
        if compiled.agrees(plain) and compiled.beats(plain):
            self.plan = candidate
            self.switches.append(Switch(update, candidate))
            self.break_even = planning.break_even(worker.seconds + warm, plain.middle, compiled.middle, update, 1)
            self.compile_reason = (
                f"{compiled.middle:.3g} s against {plain.middle:.3g} s a step, ready after {worker.seconds:.1f} s"
            )
        else:
            self.owner.uncompile()
            self.compile_reason = (
                f"compiled {compiled.middle:.3g} s against {plain.middle:.3g} s a step: it does not win"
            )
        self._remember(saved_seconds=max(saved, 0.0), warm_seconds=warm, cold_seconds=worker.seconds)

    def _now(self) -> float:
        """Seconds a micro-batch under the plan in force."""
        own = [t.middle for t in self.timings if t.plan == self.plan]
        plain = [t.middle for t in self.timings if t.plan == self.start]
        return self.step_seconds * own[-1] / plain[-1] if own and plain and plain[-1] else self.step_seconds

    # -- what stays -----------------------------------------------------------------------------------------------

    def _remember(self, **figures: float) -> None:
        """Only what was measured is remembered: a run too short to measure has learnt nothing."""
        if self.memory is None or not self.timings:
            return
        self.memory.keep(
            self._key,
            {
                "plan": self.plan.as_dict(),
                "device": self.device.type,
                "torch": str(torch.__version__),
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "compile_reason": self.compile_reason,
                "candidates": [t.as_dict() for t in self.timings],
                **figures,
            },
        )

    def resume(self, plan: Plan, update: int) -> None:
        """A resumed run goes on under the plan that was in force, at its next window; nothing is tried again."""
        self.state = "done"
        self.reason = "the plan of the run that is resumed"
        self.given = [s for s in self.given if s.update > update]
        if plan != self.plan:
            self.given.insert(0, Switch(update, plan))

    def sum_up(self, speed: SpeedFacts, facts: CompileFacts) -> None:
        """Write the plan, its reasons and every candidate's figures into the report."""
        speed.plan, speed.precision, speed.memory_format = self.plan.name, self.plan.precision, self.plan.memory_format
        speed.reason = self.reason
        speed.candidates = [timing.as_dict() for timing in self.timings]
        facts.break_even_update = self.break_even
        if self.compile_reason:
            facts.reason = self.compile_reason

    def end(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
            self.compile_reason = self.compile_reason or "the run ended before the compile was ready"

    def write(self, folder: Path) -> Path:
        """The plan with its switches, which `plan=FILE` runs without a trial."""
        return write_switches(folder, self.start, self.switches)
