"""The compile of one run, beside it: whether it is worth starting, its worker, and the judgement of what it gave.

Where the run's own threads take every core, a worker beside it would slow both (threads that wait for each other
spin: steps of 0.1 s took 0.9 s), so the run waits for it. Where a worker does not fit into memory, the code is compiled
in the run. Both show a progress line.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from plugins.core import memory
from plugins.core import plan as planning
from plugins.core.compilation import Compilation
from plugins.core.compile import CUDA_GRAPH_MODES, first_line
from plugins.core.plan import Plan, Timing
from plugins.core.precompile import Captured, Worker
from plugins.core.trial import Moment, NotFinite, fusable_share, time_steps


class Owner(Protocol):
    """What trials need of the session that owns them."""

    def untouched(self) -> AbstractContextManager[None]: ...

    def clear_gradients(self) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...


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
        self._waits = False

    def begin(self, moment: Moment, plan: Plan, step_seconds: float) -> bool:
        """Whether a compile is under way now; `learnt.reason` says why not. `step_seconds`: of a micro-batch."""
        learnt, device = self.learnt, self.device
        modules, self.scope = self.compilation.modules()
        if why := planning.cannot_gain(modules, device, plan.precision) or self._no_room():
            return self._refuse(why, settled=True)
        cost = max(planning.compile_seconds(modules, device), 2 * learnt.given_up_seconds)
        if why := self._too_short(cost, 1.0 if learnt.fusable is None else learnt.fusable, moment, step_seconds):
            return self._refuse(why)
        if why := self.compilation.impossible:
            return self._refuse(why)
        with self.owner.untouched(), Captured(modules, self.compilation.takes) as captured:
            learnt.fusable = fusable_share(moment.trial, device, self.owner.clear_gradients)
        if why := self._too_short(cost, learnt.fusable, moment, step_seconds):
            return self._refuse(why)
        if not captured.calls:
            return self._refuse("the loop does not call what would be compiled", settled=True)
        if not memory.room_for_worker(device):
            self.owner.progress(f"compiling in the run (about {cost:.0f} s): a process beside it would not fit")
            return True
        self._waits = not has_spare_core(device)
        budget = planning.budget(cost, learnt.fusable, moment.left * step_seconds, self._waits)
        try:
            with moment.trial.bare():
                self._worker = Worker(
                    captured.calls, self.compilation.arguments(self.scope), self.compilation.dims, budget
                )
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

        A step of one and a step of the other in turn: the machine's other work then slows both alike.

        Raises:
            NotFinite: this batch judges nothing; `judge` again on another.
        """
        learnt, ready = self.learnt, True
        plain, compiled = Timing(plan), Timing(replace(plan, compile=self.scope))
        with self.owner.untouched():
            ready = self._step(moment, plain, warm=True)
            if ready and not math.isfinite(plain.loss):
                raise NotFinite
            self.compilation.install(*self.compilation.modules(self.scope))
            ready = ready and self._step(moment, compiled, warm=True)
            for _ in range(planning.repeats(moment.left)):
                with self.compilation.paused():
                    ready = ready and self._step(moment, plain)
                ready = ready and self._step(moment, compiled)
        self.timings = [timing for timing in (plain, compiled) if timing.seconds]
        if not ready or not self.compilation.active:
            why = self.compilation.facts.reason if not self.compilation.active else "its trial failed"
            self.compilation.undo()
            self._refuse(why, settled=lasts(why))
            return None
        warm = max(compiled.first - compiled.middle, 0.0)
        learnt.cold_seconds, learnt.warm_seconds = (self._worked, warm) if self._worked else (warm, 0.0)
        learnt.saved_seconds, learnt.settled = max(plain.middle - compiled.middle, 0.0), True
        figures = f"{compiled.middle:.3g} s a step, eager {plain.middle:.3g} s"
        if compiled.agrees(plain) and compiled.beats(plain):
            cost = learnt.cold_seconds + learnt.warm_seconds
            self.break_even = planning.break_even(cost, plain.middle, compiled.middle, moment.update, moment.size)
            how = "beside the run" if self._worked and not self._waits else "for which the run waited"
            learnt.reason = f"{figures}; ready after {learnt.cold_seconds:.1f} s {how}"
            return compiled.plan
        self.compilation.undo()
        learnt.reason = f"it does not win: {figures}"
        if not compiled.agrees(plain):
            learnt.reason = f"dropped, its loss {compiled.loss:.6g} is not {plain.loss:.6g}"
            self.owner.warn(f"plan {compiled.plan.name}: {learnt.reason}")
        return None

    def _step(self, moment: Moment, timing: Timing, warm: bool = False) -> bool:
        """One more step of a plan, counted unless it warms up; False where it fails."""
        clear, warn, repeats = self.owner.clear_gradients, self.owner.warn, 0 if warm else 1
        return time_steps(moment.trial, timing.plan, self.device, clear, warn, repeats, warm, into=timing) is not None

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
