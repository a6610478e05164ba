"""Compile beside the running training: a worker process that fills the compiler's cache.

The worker gets the modules and, for their inputs, shapes and kinds only. It runs each once, forward and backward,
through the same in-place compile as the run will; the run then finds the code in the cache. A worker that hangs,
crashes or outlives its budget is ended, and costs the run nothing but the time of a core.

    python -m plugins.core.compile.worker JOB        # what the run starts by itself
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
from torch import Tensor

from plugins.core.compile.capture import Call, made
from plugins.core.compile.compiled_module import CompiledModule, failure
from plugins.core.compile.decision import CompileOutcome, CompileResult
from plugins.core.compile.dynamic_shapes import Marker
from plugins.core.compile.toolchain import end_group
from plugins.core.system import malloc
from plugins.core.system.memory import Peaks, in_use_gib

PREFIX = "accel-compile-"  # of a worker's folder; the run's process id follows
OUTCOME = "outcome"  # the file in which a worker that failed says how
MEMORY = "memory"  # and that of what it measured


class WorkerState(str, Enum):
    """How a worker stands. LATE: it outlived its budget; DIED: it ended without saying why."""

    RUNNING = "running"
    READY = "ready"
    LATE = "late"
    DIED = "died"
    FAILED = "failed"


@dataclass(frozen=True)
class StepMemory:
    """GiB of a compiled step: what its compile left in use, and what a step takes on top."""

    left_gib: float
    step_gib: float


class Worker:
    """One compile under way in another process, of every call in each of `ways`: how it is compiled.

    `poll` says how it stands, and `fault` why it will not be ready; `stop` ends it. With `times`, how often a step
    makes each call, it measures the memory of a step in the first way instead; `memory` holds it then.

    Raises:
        Exception: whatever pickling raised: the model cannot be handed to another process.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        ways: Sequence[dict[str, Any]],
        dims: Sequence[int],
        budget_seconds: float,
        times: Sequence[int] = (),
    ) -> None:
        job = {
            "calls": list(calls),
            "ways": list(ways),
            "dims": tuple(dims),
            "times": tuple(times),
            "threads": torch.get_num_threads(),
            "parent": os.getpid(),
            "seconds": 2 * budget_seconds,
        }
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.began, self.budget = time.monotonic(), budget_seconds
        self.fault: CompileOutcome | None = None
        self.memory: StepMemory | None = None
        try:
            with (self.folder / "job").open("wb") as file:
                cloudpickle.dump(job, file)  # a script's own classes too, which another process cannot import
            path = os.pathsep.join([*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")])
            with (self.folder / "errors").open("wb") as errors:
                self.process = subprocess.Popen(
                    [*command(), str(self.folder / "job")],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        # Also where nobody calls it: at Ctrl-C, at the interpreter's end, and once an interrupted cell is forgotten.
        self.stop = weakref.finalize(self, _stop, os.getpid(), self.process, self.folder)

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def poll(self) -> WorkerState:
        """How it stands; one that has ended, or outlived its budget, is stopped and its folder is gone."""
        code = self.process.poll()
        if code is None and self.seconds <= self.budget:
            return WorkerState.RUNNING
        if code is None:
            state = WorkerState.LATE
            self.fault = CompileOutcome(
                CompileResult.OUT_OF_TIME, f"given up: it outlived its budget of {self.budget:.0f} s"
            )
        elif code == 0:
            state, self.memory = WorkerState.READY, self._measured()
        elif told := self._told():
            state, self.fault = WorkerState.FAILED, told
        else:
            state, self.fault = WorkerState.DIED, CompileOutcome(CompileResult.FAILED, f"given up: {self._death(code)}")
        self.stop()
        return state

    def _measured(self) -> StepMemory | None:
        with contextlib.suppress(OSError, ValueError):
            return StepMemory(**json.loads((self.folder / MEMORY).read_text()))
        return None

    def _told(self) -> CompileOutcome | None:
        """What the worker itself said of its failure."""
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((self.folder / OUTCOME).read_text())
            return CompileOutcome(
                CompileResult.FAILED, f"given up: its worker failed: {told['reason']}", bool(told["retryable"])
            )
        return None

    def _death(self, code: int) -> str:
        """Of a worker that said nothing: its compile may be fine, and its last words are for a person only."""
        if code < 0:
            return f"its worker was killed (signal {-code})"
        text = self._last_line()
        return f"its worker failed: {text}" if text else "its worker failed without a word"

    def _last_line(self) -> str:
        """The last line that the worker wrote."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
            return textwrap.shorten(lines[-1], 300, placeholder=" …") if lines else ""
        return ""


def _stop(owner: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the worker and the compilers that it started; a fork of the run, such as a loader's, leaves them alone."""
    if os.getpid() == owner:
        end_group(process)
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove folders of this user's runs that were killed together with their workers."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):  # another run sweeps too
            # A worker that outlived its run ends itself within a second, and needs its folder no more.
            if path.lstat().st_uid == os.getuid() and owner.isdecimal() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(path, ignore_errors=True)


def command() -> list[str]:
    """How a worker is started; tests put a stand-in here."""
    return [sys.executable, "-m", "plugins.core.compile.worker"]


def run(job: dict[str, Any]) -> CompileOutcome | None:
    """In the worker: compile every call of the job in every way, forward and backward; returns what failed."""
    torch.set_num_threads(job["threads"])
    for way, call in product(job["ways"], job["calls"]):
        failed: list[CompileOutcome] = []
        part = CompiledModule(call.module, **way, marker=Marker(job["dims"]), give_up=failed.append)
        part.install()
        output = _forward(call)
        if failed:
            return failed[0]
        _backward(output)
        part.undo()
    return None


def measured(job: dict[str, Any]) -> StepMemory | CompileOutcome:
    """In the worker: compile the calls of the job, and measure a step that makes all of them; or what failed."""
    torch.set_num_threads(job["threads"])
    device = next((p.device for call in job["calls"] for p in call.module.parameters()), torch.device("cpu"))
    failed: list[CompileOutcome] = []
    for module in {call.module: None for call in job["calls"]}:
        CompiledModule(module, **job["ways"][0], marker=Marker(job["dims"]), give_up=failed.append).install()
    begun = in_use_gib(device)
    _backward([_forward(call) for call in job["calls"]])
    malloc.trim()
    held, peaks = in_use_gib(device), Peaks(device)
    _backward([_forward(call) for call, many in zip(job["calls"], job["times"], strict=True) for _ in range(many)])
    peaks.update_done()
    return failed[0] if failed else StepMemory(max(held - begun, 0.0), max((peaks.first_gib or 0.0) - held, 0.0))


def _forward(call: Call) -> Any:
    with torch.autocast(call.autocast[0], dtype=call.autocast[1]) if call.autocast else nullcontext():
        return call.module(*made(call.args), **made(call.kwargs))


def _backward(output: Any) -> None:
    losses = [t.float().sum() for t in _floating(output) if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()


def _floating(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _floating(item)] if isinstance(value, (list, tuple)) else []


def _die_with(parent: int, seconds: float, folder: Path) -> None:
    """End this process, its compilers and its folder when the run is gone, or forgot it."""
    until = time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """The worker process: compile what the job holds, and write how it went."""
    # The job comes from the process that started this one, and holds code by its nature: modules to compile.
    path = Path(sys.argv[1])
    try:
        with path.open("rb") as file:
            job = pickle.load(file)
        monitor = (job["parent"], job["seconds"], path.parent)
        threading.Thread(target=_die_with, args=monitor, daemon=True).start()
        found = measured(job) if job.get("times") else run(job)
        fault = found if isinstance(found, CompileOutcome) else None
        if isinstance(found, StepMemory):
            path.with_name(MEMORY).write_text(json.dumps(asdict(found)))
    except Exception as error:
        fault = failure(error)
    if fault is not None:
        with contextlib.suppress(OSError):  # a full disk
            path.with_name(OUTCOME).write_text(json.dumps(asdict(fault)))
        sys.exit(fault.reason)


if __name__ == "__main__":
    from plugins.core.compile import (
        worker as compile_worker,  # whose classes the job names; this copy of them is another
    )

    compile_worker.main()
