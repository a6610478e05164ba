"""The compile of one run, beside it: whether it is worth starting, its worker, and the judgement of what it gave.

Where the run's own threads take every core, a worker beside it would slow both (threads that wait for each other
spin: steps of 0.1 s took 0.9 s), so the run waits for it. What it would wait for and is short, or does not fit into
memory twice, is compiled in the run: a worker's start takes as long. All show a progress line, and are given up at
their budget. Where memory is tight, a worker first measures a compiled step on a quarter of the batch; what would not
fit is not tried.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from plugins.core.autotune import cost_model
from plugins.core.autotune.paired_comparison import TRIAL_FAILED, Owner, PairedComparison
from plugins.core.autotune.timing import NotFinite, WindowStart, fusable_share
from plugins.core.compile.capture import Captured
from plugins.core.compile.compiled_module import CUDA_GRAPH_MODES, first_line
from plugins.core.compile.decision import CompileOutcome, CompileResult, CompileStage
from plugins.core.compile.manager import CompileManager
from plugins.core.compile.toolchain import may_limit
from plugins.core.compile.worker import Worker, WorkerState
from plugins.core.plan import Plan, Timing
from plugins.core.system import memory
from plugins.errors import AccelError


@dataclass
class CompileFindings:
    """What is known of compiling this work.

    Attributes:
        reason: what it came to, for a person.
        settled: another run of any length would come to the same.
        cold_seconds: of the worker.
        warm_seconds: until the code ran from the cache.
        saved_seconds: per micro-batch.
        given_up_seconds: the budget that an earlier worker outlived.
        fusable: the share of a step that a compile could save, 0 to 1.
    """

    reason: str = ""
    settled: bool = False
    cold_seconds: float = 0.0
    warm_seconds: float = 0.0
    saved_seconds: float = 0.0
    given_up_seconds: float = 0.0
    fusable: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a JSON value, for the plan cache."""
        return asdict(self)


def has_spare_core(device: torch.device) -> bool:
    """Whether a worker runs beside the training without taking a core that it computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return device.type != "cpu" or cores > torch.get_num_threads()


POLL_SECONDS = 0.05
PART = 4  # of the batch: that much less is measured where a whole step may not fit
IN_RUN_SECONDS = 12.0  # of a compile: a worker takes 3 to 4 s more, and is the safer end of one that hangs


class BackgroundCompile:
    """`begin` starts a compile where it is likely to be won back; `poll` follows it; `judge` keeps it if it wins.

    Attributes:
        learnt: what is known of compiling this work, for later runs.
        break_even: the update at which the compile has paid for itself, where it won.
        scope: of what is compiled: whole, regional or features.
        timings: of the plans that were compared.
        waits: whether the run waits for the compile; else it goes on beside it.
    """

    def __init__(self, owner: Owner, device: torch.device, compilation: CompileManager) -> None:
        self.owner, self.device, self.compilation = owner, device, compilation
        self.findings = CompileFindings()
        self.break_even: int | None = None
        self.scope = ""
        self.timings: list[Timing] = []
        self._worker: Worker | None = None
        self._worked = 0.0  # seconds, of a worker that is done
        self._budget = 0.0  # seconds
        self.waits = self._graphs = False

    def begin(self, window_start: WindowStart, plan: Plan, step_seconds: float) -> bool:
        """Whether a compile is under way now; the decision says why not. `step_seconds`: of a micro-batch."""
        findings, device = self.findings, self.device
        modules, self.scope = self.compilation.modules()
        if why := cost_model.cannot_gain(modules, device) or self._no_room():
            return self._not_worth(why, retryable=False)
        cost = max(cost_model.compile_seconds(modules, device), 2 * findings.given_up_seconds)
        if why := self._too_short(
            cost, 1.0 if findings.fusable is None else findings.fusable, window_start, step_seconds
        ):
            return self._not_worth(why)
        if impossible := self.compilation.impossible:
            return self.stays_eager(impossible)
        reached: list[bool] = []

        def clear() -> None:
            reached.extend(p.grad is not None for p in self.compilation.model.parameters() if p.requires_grad)
            self.owner.clear_gradients()

        try:
            with self.owner.untouched(), Captured(modules, self.compilation.takes) as captured:
                findings.fusable = fusable_share(window_start.trial, device, clear)
        except AccelError:
            raise
        except Exception as error:  # what fails without being watched comes again in the run's step, as its own error
            self.owner.warn(f"compile: its trial failed ({first_line(error)}); the run goes on eagerly")
            return self.stays_eager(replace(TRIAL_FAILED, retryable=True))
        precision = window_start.trial.host_precision if plan.precision == "host" else plan.precision
        if why := cost_model.too_little_to_fuse(findings.fusable, device, precision):
            return self._not_worth(why)  # of this batch: one of another length may have more to fuse
        if why := self._too_short(cost, findings.fusable, window_start, step_seconds):
            return self._not_worth(why)
        if not captured.calls:
            return self._not_worth("the loop does not call what would be compiled", retryable=False)
        # CUDA graphs need gradients that exist: a zero one where none would be lets weight decay move the parameter.
        self._graphs = self.compilation.may_use_cuda_graphs and all(reached) and memory.room_for_cuda_graphs(device)
        if self._graphs and self._too_short(2 * cost, findings.fusable, window_start, step_seconds):
            self._graphs = False
        self.waits = not has_spare_core(device)
        in_run = (self.waits and cost <= IN_RUN_SECONDS and may_limit()) or not memory.room_for_worker(device)
        self.waits = self.waits or in_run
        seconds_left = window_start.left * step_seconds
        budget = self._budget = cost_model.budget((1 + self._graphs) * cost, findings.fusable, seconds_left, self.waits)
        tight = not (memory.room_for_worker(device) or memory.room_for_twice(device))
        if tight and (why := self._does_not_fit(captured, window_start, budget)):
            return self.stays_eager(CompileOutcome(CompileResult.NO_MEMORY, why))
        if in_run:
            self.owner.progress(f"compiling {self.scope}, in the run, for at most {budget:.0f} s")
            self.compilation.decision.now(CompileStage.COMPILING)
            return True
        ways = [self.compilation.arguments(self.scope, graphs) for graphs in (False, True)[: 1 + self._graphs]]
        try:
            with window_start.trial.bare():
                self._worker = Worker(captured.calls, ways, self.compilation.dims, budget)
        except Exception as error:
            why = f"the model cannot be handed to a compile worker ({first_line(error)})"
            self.owner.warn(f"compile: {why}; the run goes on eagerly")
            return self.stays_eager(CompileOutcome(CompileResult.IMPOSSIBLE, why))
        how = "the run waits" if self.waits else "beside the run"
        self.owner.progress(f"compiling {self.scope}, {how}, for at most {budget:.0f} s")
        self.compilation.decision.now(CompileStage.COMPILING)
        return True

    def _does_not_fit(self, captured: Captured, window_start: WindowStart, budget: float) -> str:
        """Why the first compiled step would not fit into memory: a worker has measured one on a part of the batch."""
        device = self.device
        parts = [call.of_batch(PART) for call in captured.calls]
        if not memory.room_for_worker(device, min(factor for _, factor in parts)):
            return "memory has no room to measure a compiled step"
        self.owner.progress(f"measuring the memory of a compiled step, the run waits, for at most {budget:.0f} s")
        ways = [self.compilation.arguments(self.scope, False)]
        try:
            with window_start.trial.bare():
                worker = Worker([call for call, _ in parts], ways, self.compilation.dims, budget, captured.times)
        except Exception as error:
            return f"the memory of a compiled step cannot be measured ({first_line(error)})"
        try:
            while worker.poll() is WorkerState.RUNNING:
                time.sleep(POLL_SECONDS)
        finally:
            worker.stop()
        if worker.memory is None:
            return f"the memory of a compiled step could not be measured: {worker.fault and worker.fault.reason}"
        need = worker.memory.left_gib + max(factor for _, factor in parts) * worker.memory.step_gib
        free = memory.free_beyond_gib(device, memory.in_use_gib(device))
        return "" if need <= free else f"its first step would take about {need:.2f} GiB of {free:.2f} GiB that are free"

    def poll(self) -> WorkerState:
        """How the compile stands; where it will not be ready, the decision says why."""
        worker = self._worker
        if worker is None:  # in the run
            return WorkerState.READY
        while (state := worker.poll()) is WorkerState.RUNNING and self.waits:
            time.sleep(POLL_SECONDS)
        if state is WorkerState.RUNNING:
            return state
        self._worker = None
        if state is WorkerState.READY:
            self._worked = worker.seconds
        if state is WorkerState.LATE:
            self.findings.given_up_seconds = worker.budget
        if worker.fault is not None:
            self.stays_eager(worker.fault)
            self.owner.warn(f"compile: {worker.fault.reason}; the run goes on eagerly")
        return state

    def judge(self, window_start: WindowStart, plan: Plan) -> Plan | None:
        """Time the plan in force and its compiled twin on the batch at hand; the twin, if it wins, is left in force.

        The twin with CUDA graphs then has to win against the better of the two.

        Raises:
            NotFinite: this batch judges nothing; `judge` again on another.
        """
        findings, compilation, twin = self.findings, self.compilation, replace(plan, compile=self.scope)
        best, saved, firsts, warm, built, kept = plan, 0.0, 0.0, 0.0, 0, 0
        reasons: list[str] = []
        for challenger in (twin, replace(twin, cuda_graphs=True))[: 1 + self._graphs]:
            comparison = PairedComparison(self.owner, compilation, Timing(best), Timing(challenger))
            try:
                comparison.run(window_start, self._budget)
            except NotFinite:
                compilation.undo()
                raise
            if comparison.fault is not None and challenger == twin:
                self._failed(comparison, comparison.fault)
                return None
            self.timings += [timing for timing in (comparison.holder, comparison.challenger) if timing.seconds]
            reasons.append(comparison.verdict)
            built, firsts = built + comparison.graphs, firsts + comparison.warm_seconds
            if comparison.wins:
                compilation.put(comparison.code)
                best, kept, warm = challenger, comparison.graphs, comparison.warm_seconds
                saved += comparison.holder.middle - comparison.challenger.middle
        compilation.spared = built - kept
        findings.cold_seconds, findings.warm_seconds = (self._worked, warm) if self._worked else (firsts, 0.0)
        findings.saved_seconds = saved
        if best != plan:
            cost = self._worked + firsts
            self.break_even = cost_model.break_even(cost, saved, 0.0, window_start.update, window_start.size)
            how = "beside the run" if self._worked and not self.waits else "for which the run waited"
            reasons.append(f"ready after {findings.cold_seconds:.1f} s {how}")
        if best == plan:
            self.stays_eager(CompileOutcome(CompileResult.LOST, "; ".join(reasons), retryable=False))
            return None
        won = CompileOutcome(CompileResult.WON, "; ".join(reasons), retryable=False)
        self._learn(won)
        compilation.runs(won)
        return best

    def _failed(self, comparison: PairedComparison, fault: CompileOutcome) -> None:
        """Nothing of it runs."""
        self.timings += [comparison.holder] if comparison.holder.seconds else []
        if fault.outcome is CompileResult.OUT_OF_TIME:
            self.findings.given_up_seconds = self._budget
        self.stays_eager(fault)
        if comparison.fault_is_news:
            self.owner.warn(f"compile: {fault.reason}; the run goes on eagerly")

    def end(self) -> None:
        """The run is over: a worker that still compiles is stopped, and the decision says so."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
            why = "the run ended before the compile was ready"
            self.stays_eager(CompileOutcome(CompileResult.CUT_SHORT, why))

    def stays_eager(self, outcome: CompileOutcome) -> bool:
        """It is decided that nothing compiled runs; a compile is not under way."""
        self._learn(outcome)
        self.compilation.decision.now(CompileStage.EAGER, outcome)
        return False

    def _not_worth(self, why: str, retryable: bool = True) -> bool:
        return self.stays_eager(CompileOutcome(CompileResult.NOT_WORTH, why, retryable))

    def _learn(self, outcome: CompileOutcome) -> None:
        self.findings.reason, self.findings.settled = outcome.reason, not outcome.retryable

    def _no_room(self) -> str:
        graphs = self.compilation.config.compile_mode in CUDA_GRAPH_MODES
        return (
            "CUDA graphs would not fit into memory" if graphs and not memory.room_for_cuda_graphs(self.device) else ""
        )

    def _too_short(self, cost: float, fusable: float, window_start: WindowStart, step_seconds: float) -> str:
        needed = cost_model.seconds_to_pay(cost, fusable) / step_seconds
        if window_start.left >= needed:
            return ""
        return (
            f"a compile of about {cost:.0f} s pays in a run of about {needed / window_start.size:.0f} updates or more; "
            f"{window_start.left / window_start.size:.0f} are left"
        )
