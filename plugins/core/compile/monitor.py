"""The watch: how many graphs were compiled, why, in which phase, and what fell silently back to eager.

Reads torch's own compilation metrics (one row a compile; rows of a backward say so) and listens to the compile
callbacks for a progress line, so that a first compile of minutes does not look like a frozen bar.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo.callback as compile_callbacks
from torch._dynamo.utils import (
    counters,
    get_compilation_metrics,
    graph_break_reasons,
    set_compilation_metrics_limit,
)

from plugins.core.system import versions

ROWS_KEPT = 4096  # torch keeps 64
TICK_SECONDS = 1.0


class CompileMonitor:
    """Counts compiles of this process from `start` to `end`.

    `progress(seconds, graphs, done)` is called about once a second while a compile runs, and once after it.
    """

    def __init__(self, progress: Callable[[float, int, bool], None] | None = None) -> None:
        self.progress = progress
        self.phase = "train"
        self.seconds = 0.0
        self._phases: list[str] = []
        self._open = 0
        self._since = 0.0
        self._timer: threading.Timer | None = None
        self._started_us = 0
        self._graphs_before = 0
        self._breaks: dict[str, int] = {}
        self._elsewhere: list[tuple[float, float]] = []  # times of the other phases, us
        self._not_ours: set[int] = set()  # places in torch's list of breaks: before the start, and of the other phases

    def start(self) -> None:
        """Count from here on."""
        set_compilation_metrics_limit(ROWS_KEPT)
        self._started_us = time.time_ns() // 1000
        self._graphs_before = counters["stats"]["unique_graphs"]
        self._breaks = dict(counters["graph_break"])
        self._not_ours = set(range(len(graph_break_reasons)))
        compile_callbacks.on_compile_start(self._started)
        compile_callbacks.on_compile_end(self._ended)

    def end(self) -> None:
        """Count no further, and take the callbacks off the compiler."""
        handler = compile_callbacks.callback_handler
        for callbacks, ours in (
            (handler.start_callbacks, self._started),
            (handler.end_callbacks, self._ended),
        ):
            if ours in callbacks:
                callbacks.remove(ours)
        self._cancel()

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Compiles inside belong to `phase`: they are not among training's graphs, recompiles and breaks."""
        before, self.phase = self.phase, phase
        began, breaks = time.time_ns() // 1000, dict(counters["graph_break"])
        self._elsewhere.append((began, math.inf))
        listed = len(graph_break_reasons)
        try:
            yield
        finally:
            self.phase = before
            self._elsewhere[-1] = (began, time.time_ns() // 1000)
            self._not_ours |= set(range(listed, len(graph_break_reasons)))
            for reason, count in counters["graph_break"].items():
                self._breaks[reason] = self._breaks.get(reason, 0) + count - breaks.get(reason, 0)

    @property
    def graphs(self) -> int:
        """Forward graphs that training built since `start`."""
        return sum(1 for row in self._rows() if row.is_forward and row.fail_type is None)

    @property
    def recompiles(self) -> int:
        """Graphs that were built for a shape or a guard that an earlier one did not serve."""
        return len(self.recompile_reasons)

    @property
    def recompile_reasons(self) -> list[str]:
        """Why, as torch says it; one line per recompile."""
        reasons = (versions.recompile_reason(row) for row in self._rows() if row.is_forward)
        return [reason for reason in reasons if reason]

    @property
    def fell_to_eager(self) -> list[str]:
        """Frames that torch stopped compiling at its limit, and now runs eagerly without a word."""
        rows = self._rows()
        # The row of the limit does not name its frame, an earlier one of the same frame does: "3/0", then "3/8".
        names = {_frame(row): f"{row.co_filename}:{row.co_firstlineno} {row.co_name}" for row in rows if row.co_name}
        hit = [row for row in rows if versions.reached_limit(row)]
        return [names.get(_frame(row), f"frame {_frame(row)}") for row in hit]

    @property
    def graph_breaks(self) -> dict[str, int]:
        """Graph break reason -> count in training, since `start`.

        A branch on data is in torch's list of places, and not among its counters.
        """
        now = counters["graph_break"]
        found = {k: n - self._breaks.get(k, 0) for k, n in now.items() if n > self._breaks.get(k, 0)}
        counted = {_kind(reason) for reason in now}
        for at, place in enumerate(graph_break_reasons):
            if at not in self._not_ours and place.graph_break and _kind(place.reason) not in counted:
                found[place.reason] = found.get(place.reason, 0) + 1
        return found

    @property
    def graph_break_lines(self) -> list[str]:
        """`file:line: reason`, one a kind of graph break."""
        places = {_kind(found.reason): found.user_stack[-1] for found in graph_break_reasons if found.user_stack}
        lines = []
        for reason in self.graph_breaks:
            at = places.get(_kind(reason))
            words = " ".join(part.strip() for part in reason.splitlines()[:2])
            lines.append(f"{at.filename}:{at.lineno}: {words}" if at else words)
        return lines

    def phases(self) -> dict[str, int]:
        """Compiles by the phase that they came from."""
        return {phase: self._phases.count(phase) for phase in sorted(set(self._phases))}

    @staticmethod
    def cache() -> str:
        """Say warm where a compiled graph came from the cache, cold where one was built, empty where none was."""
        found = counters["inductor"]
        if found.get("fxgraph_cache_hit"):
            return "warm"
        return "cold" if found.get("fxgraph_cache_miss") else ""

    def _rows(self) -> list[Any]:
        """Training's, by time and not by position: torch forgets its oldest rows."""
        return [row for row in get_compilation_metrics() if self._is_ours(row.start_time_us or 0)]

    def _is_ours(self, at: float) -> bool:
        return at >= self._started_us and not any(began <= at <= ended for began, ended in self._elsewhere)

    def _started(self, *_: object) -> None:
        self._open += 1
        if self._open == 1:
            self._since = time.perf_counter()
            self._phases.append(self.phase)
            self._tick()

    def _ended(self, *_: object) -> None:
        self._open = max(self._open - 1, 0)
        if self._open == 0 and self._since:
            elapsed = time.perf_counter() - self._since
            self.seconds += elapsed
            self._cancel()
            if self.progress is not None and elapsed > TICK_SECONDS:
                self.progress(self.seconds, self._graphs_now(), True)

    def _tick(self) -> None:
        if self.progress is None:
            return
        if self._timer is not None:  # not at once: a compile of less than a tick needs no line
            self.progress(time.perf_counter() - self._since + self.seconds, self._graphs_now(), False)
        self._timer = threading.Timer(TICK_SECONDS, self._tick)
        self._timer.daemon = True
        self._timer.start()

    def _graphs_now(self) -> int:
        """Graphs while a compile ends: its row is written a moment later."""
        return max(counters["stats"]["unique_graphs"] - self._graphs_before, 0)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def show_progress(seconds: float, graphs: int, done: bool) -> None:
    """The line that a compile shows while it runs: once a second on a terminal, every ten seconds elsewhere."""
    text = f"accel: compiling, {seconds:.0f} s, {graphs} graphs built"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}{chr(10) if done else ''}")
        sys.stderr.flush()
    elif done or round(seconds) % 10 == 0:
        sys.stderr.write(f"{text}\n")


def _kind(reason: str) -> str:
    """The lines of a graph break's reason that are alike in torch's counters and in its list of places."""
    return "\n".join(reason.strip().splitlines()[:2])


def _frame(row: Any) -> str:
    return str(row.compile_id).rpartition("/")[0]
