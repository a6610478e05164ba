"""What every row of `python -m benchmarks` shares: contenders as values, run in turn, each in a process of its own.

A contender is a name and a function. In a row of steps the function trains and calls `job.turns.done(units)` after
each step: its process then waits while the others take their turn. In a row of whole runs the function returns
figures, and the process is started anew each time. Heavy imports belong inside the functions.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
STARTED = "BENCHMARKS_STARTED"  # time.time() at which the parent started this process
Figures = dict[str, Any]


class Skip(Exception):
    """A contender that cannot run here; its text is one line for the table."""


@dataclass
class Job:
    """What one process is asked for.

    Args:
        round: the number of the repeat, from 0; also the seed where runs differ by one.
        quick: the small size, of the tests.
        folder: empty, of this process.
        shared: of all contenders of the row, in every round.
        turns: what a row of steps tells its steps to.
    """

    round: int
    quick: bool
    folder: Path
    shared: Path
    turns: Turns | None = None

    def sized(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    def step(self, units: float = 1.0) -> None:
        assert self.turns is not None, "a row of whole runs has no steps"
        self.turns.done(units)


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[Job], Figures | None]


@dataclass(frozen=True)
class Figure:
    """A column: the figure's key, what it is called, how it is written, and whether its ratio is shown."""

    key: str
    title: str
    form: str = "{:.3g}"
    ratio: str = ""  # the column of ratios to the first contender; empty: none


@dataclass(frozen=True)
class Row:
    """Things that are compared; the first contender is what the others are measured against.

    `steps`: (warm-up, a turn) in steps, full size; None where whole processes run in turn.
    """

    key: str
    what: str
    contenders: tuple[Contender, ...]
    steps: tuple[int, int] | None = None
    quick_steps: tuple[int, int] = (1, 1)
    rounds: int = 5
    threads: int | None = None

    def named(self, name: str) -> Contender:
        return next(one for one in self.contenders if one.name == name)


@dataclass(frozen=True)
class Section:
    """Rows with the same figures: one table."""

    key: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    rows: tuple[Row, ...] = field(default=())


STEP_FIGURES = (
    Figure("seconds", "s", ratio="ratio"),
    Figure("cpu", "CPU s", ratio="ratio of CPU time"),
    Figure("peak_gib", "peak GiB", "{:.2f}", ratio="ratio of memory"),
)


class Turns:
    """The child's side of a row of steps: answers after as many steps as were asked for, then waits to be asked."""

    def __init__(self, asks: IO[str], answers: IO[str]) -> None:
        self.asks, self.answers = asks, answers
        self._wait()

    def done(self, units: float) -> None:
        """One step is done, of so many units (samples)."""
        self.units += units
        self.left -= 1
        if self.left:
            return
        clock, cpu = time.perf_counter() - self.clock, time.process_time() - self.cpu
        found = {"seconds": clock / self.units, "cpu": cpu / self.units, "peak_gib": peak_gib()}
        print(json.dumps(found), file=self.answers, flush=True)
        self._wait()

    def _wait(self) -> None:
        asked = self.asks.readline()
        if not asked:  # the row is over; the host's own loop knows nothing of that
            os._exit(0)
        self.left, self.units = int(asked), 0.0
        self.clock, self.cpu = time.perf_counter(), time.process_time()


def peak_gib() -> float:
    """Of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def since_start() -> float:
    """Seconds since the parent started this process, interpreter and imports included."""
    return time.time() - float(os.environ[STARTED])


# -- the parent's side -----------------------------------------------------------------------------------------------


class Process:
    """A contender in a process of its own."""

    def __init__(self, row: Row, name: str, number: int, quick: bool, folder: Path, shared: Path) -> None:
        self.name, self.log = name, folder / "log.txt"
        folder.mkdir(parents=True)
        shared.mkdir(parents=True, exist_ok=True)
        line = [sys.executable, "-m", "benchmarks.child", row.key, name, str(number), str(folder), str(shared)]
        given = dict(os.environ)
        if row.threads:
            given["OMP_NUM_THREADS"] = str(row.threads)
        given.update(
            {
                STARTED: repr(time.time()),
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks"))),
                "BENCHMARKS_QUICK": "1" if quick else "",
                "YOLO_OFFLINE": "true",
                "HF_HUB_OFFLINE": "1",
                "MPLBACKEND": "agg",
                "GOMP_SPINCOUNT": "1000",  # who waits for its turn takes no time from the others
            }
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=folder, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def turn(self, steps: int) -> Figures:
        """Ask for so many steps; what a step came to, a unit each. Raises Skip where the process gave up."""
        assert self.process.stdin is not None
        try:
            print(steps, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Skip(self.last_words()) from None
        return self._answer()

    def whole(self) -> Figures:
        """Wait for its end: its own figures, and wall time, CPU time (children included) and peak memory."""
        began = time.perf_counter()
        found = self._answer()
        assert self.process.stdout is not None
        self.process.stdout.read()
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        return {"seconds": wall, "cpu": used.ru_utime + used.ru_stime, "peak_gib": used.ru_maxrss / 2**20, **found}

    def _answer(self) -> Figures:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: Figures = json.loads(line) if line else {"skip": self.last_words()}
        if "skip" in found:
            raise Skip(found["skip"])
        return found

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return (lines[-1] if lines else "ended without a word")[:200]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_row(
    row: Row,
    first: int,
    quick: bool,
    folder: Path,
    skipped: dict[str, str],
    done: Callable[[int, Mapping[str, Figures]], None],
) -> None:
    """Run the row's rounds from number `first` on; each is told to `done` as soon as it is complete."""
    names = [one.name for one in row.contenders if one.name not in skipped]
    rounds = range(first, 1 if quick else row.rounds)
    if not rounds:
        return
    if row.steps is None:
        for number in rounds:
            found = {}
            for name in names:
                if name not in skipped:
                    process = Process(
                        row, name, number, quick, folder / f"{number}-{names.index(name)}", folder / "data"
                    )
                    with ExitStack() as stack:
                        stack.callback(process.end)
                        try:
                            found[name] = process.whole()
                        except Skip as why:
                            skipped[name] = str(why)
            if not found:  # nothing of this row runs here
                return
            done(number, found)
        return
    warm_up, turn = row.quick_steps if quick else row.steps
    with ExitStack() as stack:
        running: dict[str, Process] = {}
        for index, name in enumerate(names):
            process = Process(row, name, first, quick, folder / f"{first}-{index}", folder / "data")
            stack.callback(process.end)
            try:
                process.turn(warm_up)
                running[name] = process
            except Skip as why:
                skipped[name] = str(why)
        for number in rounds:
            found = {}
            for name in list(running):
                try:
                    found[name] = running[name].turn(turn)
                except Skip as why:
                    skipped[name] = str(why)
                    del running[name]
            if not found:  # nothing of this row runs here
                return
            done(number, found)
