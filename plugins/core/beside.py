"""The compile of one run, beside it: whether it is worth starting, its worker, and the judgement of what it gave.

Where the run's own threads take every core, a worker beside it would slow both (threads that wait for each other
spin: steps of 0.1 s took 0.9 s), so the run waits for it. What it would wait for and is short, or does not fit into
memory twice, is compiled in the run: a worker's start takes as long. All show a progress line, and are given up at
their budget.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from plugins.core import memory
from plugins.core import plan as planning
from plugins.core.compilation import Compilation
from plugins.core.compile import CUDA_GRAPH_MODES, first_line
from plugins.core.contest import TRIAL_FAILED, Contest, Owner
from plugins.core.plan import Plan, Timing
from plugins.core.precompile import Captured, Worker
from plugins.core.toolchain import may_limit
from plugins.core.trial import Moment, NotFinite, fusable_share
from plugins.errors import AccelError


@dataclass
class Learnt:
    """What is known of compiling this work. `settled`: another run of any length would come to the same.

    Seconds: `cold` of the worker, `warm` until the code ran from the cache, `saved` a micro-batch; `given_up` is the
    budget that an earlier worker outlived. `fusable`: the share of a step that a compile could save.
    """

    reason: str = ""
    settled: bool = False
    cold_seconds: float = 0.0
    warm_seconds: float = 0.0
    saved_seconds: float = 0.0
    given_up_seconds: float = 0.0
    fusable: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def has_spare_core(device: torch.device) -> bool:
    """Whether a worker runs beside the training without taking a core that it computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return device.type != "cpu" or cores > torch.get_num_threads()


POLL_SECONDS = 0.05
IN_RUN_SECONDS = 12.0  # of a compile: a worker takes 3 to 4 s more, and is the safer end of one that hangs
PASSING = ("CppCompileError", "Errno", "MemoryError", "out of memory", "killed", "Killed", "its worker failed without")


def lasts(fault: str) -> bool:
    """Whether a compile would fail so again: a full disk, a broken C++ compiler or an ended process may be mended."""
    return not any(words in fault for words in PASSING)


class Beside:
    """`begin` starts a compile where it is likely to be won back; `poll` follows it; `judge` keeps it if it wins."""

    def __init__(self, owner: Owner, device: torch.device, compilation: Compilation) -> None:
        self.owner, self.device, self.compilation = owner, device, compilation
        self.learnt = Learnt()
        self.break_even: int | None = None
        self.scope = ""
        self.timings: list[Timing] = []
        self._worker: Worker | None = None
        self._worked = 0.0  # seconds, of a worker that is done
        self._budget = 0.0  # seconds
        self._waits = self._graphs = False

    def begin(self, moment: Moment, plan: Plan, step_seconds: float) -> bool:
        """Whether a compile is under way now; `learnt.reason` says why not. `step_seconds`: of a micro-batch."""
        learnt, device = self.learnt, self.device
        modules, self.scope = self.compilation.modules()
        if why := planning.cannot_gain(modules, device) or self._no_room():
            return self._refuse(why, settled=True)
        cost = max(planning.compile_seconds(modules, device), 2 * learnt.given_up_seconds)
        if why := self._too_short(cost, 1.0 if learnt.fusable is None else learnt.fusable, moment, step_seconds):
            return self._refuse(why)
        if why := self.compilation.impossible:
            return self._refuse(why)
        reached: list[bool] = []

        def clear() -> None:
            reached.extend(p.grad is not None for p in self.compilation.model.parameters() if p.requires_grad)
            self.owner.clear_gradients()

        try:
            with self.owner.untouched(), Captured(modules, self.compilation.takes) as captured:
                learnt.fusable = fusable_share(moment.trial, device, clear)
        except AccelError:
            raise
        except Exception as error:  # what fails without being watched comes again in the run's step, as its own error
            self.owner.warn(f"compile: its trial failed ({first_line(error)}); the run goes on eagerly")
            return self._refuse(TRIAL_FAILED)
        precision = moment.trial.host_precision if plan.precision == "host" else plan.precision
        if why := planning.too_little_to_fuse(learnt.fusable, device, precision):
            return self._refuse(why)  # of this batch: one of another length may have more to fuse
        if why := self._too_short(cost, learnt.fusable, moment, step_seconds):
            return self._refuse(why)
        if not captured.calls:
            return self._refuse("the loop does not call what would be compiled", settled=True)
        # CUDA graphs need gradients that exist: a zero one where none would be lets weight decay move the parameter.
        self._graphs = self.compilation.may_use_cuda_graphs and all(reached) and memory.room_for_cuda_graphs(device)
        if self._graphs and self._too_short(2 * cost, learnt.fusable, moment, step_seconds):
            self._graphs = False
        self._waits = not has_spare_core(device)
        in_run = (self._waits and cost <= IN_RUN_SECONDS and may_limit()) or not memory.room_for_worker(device)
        self._waits = self._waits or in_run
        seconds_left = moment.left * step_seconds
        budget = self._budget = planning.budget((1 + self._graphs) * cost, learnt.fusable, seconds_left, self._waits)
        if in_run:
            self.owner.progress(f"compiling {self.scope}, in the run, for at most {budget:.0f} s")
            return True
        ways = [self.compilation.arguments(self.scope, graphs) for graphs in (False, True)[: 1 + self._graphs]]
        try:
            with moment.trial.bare():
                self._worker = Worker(captured.calls, ways, self.compilation.dims, budget)
        except Exception as error:
            why = f"the model cannot be handed to a compile worker ({first_line(error)})"
            self.owner.warn(f"compile: {why}; the run goes on eagerly")
            return self._refuse(why)
        how = "the run waits" if self._waits else "beside the run"
        self.owner.progress(f"compiling {self.scope}, {how}, for at most {budget:.0f} s")
        return True

    def poll(self) -> str:
        """`running`, `ready`, or `failed`: then `learnt` says how."""
        standing = self._worker.poll() if self._worker is not None else "ready"
        while self._worker is not None and self._waits and standing == "running":
            time.sleep(POLL_SECONDS)
            standing = self._worker.poll()
        if standing == "ready" and self._worker is not None:
            self._worked, self._worker = self._worker.seconds, None
        if standing in ("running", "ready"):
            return standing
        worker, self._worker = self._worker, None
        assert worker is not None
        if worker.seconds > worker.budget:
            self.learnt.given_up_seconds = worker.budget
        self._refuse(f"given up: {standing}", settled="failed" in standing and lasts(standing))
        self.owner.warn(f"compile: given up: {standing}; the run goes on eagerly")
        return "failed"

    def judge(self, moment: Moment, plan: Plan) -> Plan | None:
        """Time the plan in force and its compiled twin on the batch at hand; the twin, if it wins, is left in force.

        The twin with CUDA graphs then has to win against the better of the two.

        Raises:
            NotFinite: this batch judges nothing; `judge` again on another.
        """
        learnt, compilation, twin = self.learnt, self.compilation, replace(plan, compile=self.scope)
        best, saved, firsts, warm, built, kept = plan, 0.0, 0.0, 0.0, 0, 0
        reasons: list[str] = []
        for challenger in (twin, replace(twin, cuda_graphs=True))[: 1 + self._graphs]:
            contest = Contest(self.owner, compilation, Timing(best), Timing(challenger))
            try:
                contest.run(moment, self._budget)
            except NotFinite:
                compilation.undo()
                raise
            if contest.fault and challenger == twin:
                self._failed(contest)
                return None
            self.timings += [timing for timing in (contest.holder, contest.challenger) if timing.seconds]
            reasons.append(contest.verdict)
            built, firsts = built + contest.graphs, firsts + contest.warm_seconds
            if contest.wins:
                compilation.put(contest.code)
                best, kept, warm = challenger, contest.graphs, contest.warm_seconds
                saved += contest.holder.middle - contest.challenger.middle
        compilation.spared = built - kept
        learnt.cold_seconds, learnt.warm_seconds = (self._worked, warm) if self._worked else (firsts, 0.0)
        learnt.saved_seconds, learnt.settled = saved, True
        if best != plan:
            cost = self._worked + firsts
            self.break_even = planning.break_even(cost, saved, 0.0, moment.update, moment.size)
            how = "beside the run" if self._worked and not self._waits else "for which the run waited"
            reasons.append(f"ready after {learnt.cold_seconds:.1f} s {how}")
        learnt.reason = "; ".join(reasons)
        return best if best != plan else None

    def _failed(self, contest: Contest) -> None:
        """Nothing of it runs."""
        self.timings += [contest.holder] if contest.holder.seconds else []
        if contest.late:
            self.learnt.given_up_seconds = self._budget
        self._refuse(contest.fault, settled=not contest.late and lasts(contest.fault))
        if contest.fault != TRIAL_FAILED:  # which is told already
            self.owner.warn(f"compile: {contest.fault}; the run goes on eagerly")

    def end(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
            self._refuse("the run ended before the compile was ready")

    def _refuse(self, why: str, settled: bool = False) -> bool:
        self.learnt.reason, self.learnt.settled = why, settled
        return False

    def _no_room(self) -> str:
        graphs = self.compilation.config.compile_mode in CUDA_GRAPH_MODES
        return (
            "CUDA graphs would not fit into memory" if graphs and not memory.room_for_cuda_graphs(self.device) else ""
        )

    def _too_short(self, cost: float, fusable: float, moment: Moment, step_seconds: float) -> str:
        needed = planning.seconds_to_pay(cost, fusable) / step_seconds
        if moment.left >= needed:
            return ""
        return (
            f"a compile of about {cost:.0f} s pays in a run of about {needed / moment.size:.0f} updates or more; "
            f"{moment.left / moment.size:.0f} are left"
        )
