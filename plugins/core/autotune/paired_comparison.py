"""Two plans on the batch at hand, a step of one and a step of the other in turn: other work then slows both alike."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from plugins.core.autotune import cost_model
from plugins.core.autotune.timing import NotFinite, Trial, WindowStart, time_steps
from plugins.core.checkpoint.rng_state import random_state, set_random_state
from plugins.core.compile.decision import CompileOutcome, CompileResult
from plugins.core.compile.manager import Code, CompileManager
from plugins.core.compile.toolchain import OutOfTime, time_limit
from plugins.core.plan import Plan, Timing
from plugins.core.step.precision import HALF

TRIAL_FAILED = CompileOutcome(CompileResult.TRIAL_FAILED, "its trial failed", retryable=False)
FLOOR = 1e-3  # of the largest gradient: what a parameter's may be off by without being wrong


class Owner(Protocol):
    """What trials need of the session that owns them."""

    @property
    def updates(self) -> int:
        """Windows closed so far."""

    def untouched(self) -> AbstractContextManager[None]:
        """What runs inside leaves no trace in the run."""

    def clear_gradients(self) -> None:
        """Drop what a trial left in the gradients."""

    def warn(self, text: str) -> None:
        """Tell the user once, and keep it in the report."""

    def progress(self, text: str) -> None:
        """Tell the user what is under way; not kept."""


@dataclass
class PairedComparison:
    """The plan in force against a compiled one.

    Attributes:
        code: the challenger's, which does not stand on the model after `run`.
        graphs: that the challenger built.
        fault: how it failed, if it did; OUT_OF_TIME where its first step outlived the limit.
        wrong: why its numbers are not the holder's, or empty.
    """

    owner: Owner
    compilation: CompileManager
    holder: Timing
    challenger: Timing
    code: Code = field(default_factory=Code)
    graphs: int = 0
    fault: CompileOutcome | None = None
    wrong: str = ""

    def run(self, window_start: WindowStart, seconds: float) -> None:
        """Time both; what is in force stays in force. The challenger's first step, a compile, is ended after `seconds`.

        Raises:
            NotFinite: this batch judges nothing.
        """
        compilation, held, built = self.compilation, self.compilation.code, self.compilation.monitor.graphs
        faults: list[CompileOutcome] = []
        plan = self.challenger.plan
        with self.owner.untouched():
            try:
                well = self._step(window_start, self.holder, warm=True)
                if well and not math.isfinite(self.holder.loss):
                    raise NotFinite
                self.code = compilation.build(*compilation.modules(plan.compile), plan.cuda_graphs, faults.append)
                compilation.put(self.code)
                with time_limit(seconds):
                    well = well and self._step(window_start, self.challenger, warm=True)
                if well and plan.cuda_graphs and not adds_up(window_start.trial, compilation.model, plan, self.owner):
                    faults.append(CompileOutcome(CompileResult.WRONG, "its gradients do not add up", retryable=False))
                for _ in range(cost_model.repeats(window_start.left)):
                    if well and not faults:
                        compilation.put(held)
                        self.owner.clear_gradients()  # one that is there costs a step more than none
                        well = self._step(window_start, self.holder)
                        compilation.put(self.code)
                        well = well and self._step(window_start, self.challenger)
            except OutOfTime as error:
                faults.append(CompileOutcome(CompileResult.OUT_OF_TIME, str(error)))
            finally:
                compilation.put(held)
        self.graphs = compilation.monitor.graphs - built
        self.fault = faults[0] if faults else None if well else TRIAL_FAILED
        if self.fault is None and not self.challenger.agrees(self.holder):
            self.wrong = f"its loss {self.challenger.loss:.6g} is not {self.holder.loss:.6g}"
        if self.wrong or (self.fault_is_news and plan.cuda_graphs):
            self.owner.warn(f"plan {plan.name}: dropped, {self.dropped}")

    @property
    def fault_is_news(self) -> bool:
        """Whether it failed in another way than the trial's steps, which tell of it themselves."""
        return self.fault is not None and self.fault.outcome is not CompileResult.TRIAL_FAILED

    @property
    def dropped(self) -> str:
        """Why the challenger cannot run, or empty."""
        return self.fault.reason if self.fault is not None else self.wrong

    @property
    def wins(self) -> bool:
        """Whether the challenger is to be left in force."""
        return not self.dropped and self.challenger.beats(self.holder)

    @property
    def warm_seconds(self) -> float:
        """What the challenger's first step took longer than the others."""
        return max(self.challenger.first - self.challenger.middle, 0.0) if self.challenger.seconds else 0.0

    @property
    def verdict(self) -> str:
        """The result in words, for the report."""
        graphs = self.challenger.plan.cuda_graphs
        if why := self.dropped:
            return f"CUDA graphs dropped, {why}" if graphs else f"dropped, {why}"
        other = "eager" if self.holder.plan.compile == "eager" else "without"
        figures = f"{self.challenger.middle:.3g} s a step, {other} {self.holder.middle:.3g} s"
        if self.wins:
            return f"with CUDA graphs {figures}" if graphs else figures
        return f"CUDA graphs do not win: {figures}" if graphs else f"it does not win: {figures}"

    def _step(self, window_start: WindowStart, timing: Timing, warm: bool = False) -> bool:
        """One more step of a plan, counted unless it warms up; False where it fails."""
        clear, warn, repeats = self.owner.clear_gradients, self.owner.warn, 0 if warm else 1
        device = self.compilation.device
        return time_steps(window_start.trial, timing.plan, device, clear, warn, repeats, warm, into=timing) is not None


def adds_up(trial: Trial, model: nn.Module, plan: Plan, owner: Owner) -> bool:
    """Whether the gradients of two steps on the batch at hand are twice those of one.

    CUDA graphs overwrite what lies in their memory: a gradient that is to be added to, or a loss that the host still
    holds (which raises).
    """
    tolerance = 1e-2 if plan.precision in HALF else 1e-3
    trained = [p for p in model.parameters() if p.requires_grad]
    state = random_state()
    owner.clear_gradients()
    try:
        loss = trial.loss()
        loss.sum().backward()
        once = [p.grad.clone() for p in trained if p.grad is not None]
        set_random_state(state)
        trial.loss().sum().backward()
        loss.detach().float().sum().item()
        twice = [p.grad for p in trained if p.grad is not None]
        if len(once) != len(twice):
            return False
        floor = FLOOR * max((float(g.norm()) for g in once), default=0.0)
        return all(
            float((two - 2 * one).norm()) <= tolerance * (2 * float(one.norm()) + floor)
            for one, two in zip(once, twice, strict=True)
        )
    except Exception:
        return False
    finally:
        owner.clear_gradients()
