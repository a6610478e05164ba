"""The trials that preflight makes of one job, each when a check first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plugins.trial_run.launch import Ended, TrialResult, run
from plugins.trial_run.request import TrialRequest

SHORT = 6  # updates of every trial beside the first
RESTORED_AT = 3
SCAN = 20  # updates at each rate
PLAIN = {"plan": "off", "compile": "off"}
ALIKE = {"batchnorm": "freeze", "seed": 0, "plan": "off"}  # an update is a function of its samples alone
LOOKED_AT = ("gradient", "reached", "division", "placement", "host_reads")
Progress = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """What is tried, and within which bounds.

    Attributes:
        command: the user's own.
        folder: of all trials.
        updates: of the first trial.
        timeout: s, of each trial.
        batch: samples a micro-batch that are wanted, for the forecast; None: those of an update.
        rates: factors of the learning rate to be scanned; empty: none.
        progress: told of every line of a trial, with its name.
    """

    command: Sequence[str]
    folder: Path
    updates: int = 50
    timeout: float = 600.0
    batch: int | None = None
    rates: tuple[float, ...] = ()
    progress: Progress = lambda name, line: None


class Trials:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def first(self) -> TrialResult:
        """The job as it is, eagerly, for as many updates as preflight may take."""
        return self._run("training", self.job.updates, PLAIN, LOOKED_AT)

    @cached_property
    def again(self) -> TrialResult:
        """The first updates once more, saved and loaded in their middle."""
        return self._run("again", self.short, PLAIN, ("gradient", f"restored:{RESTORED_AT}"))

    @cached_property
    def accumulated(self) -> TrialResult:
        """A few updates of which each is a function of its samples: no dropout, BatchNorm frozen.

        In the buckets that the compiled trial had: a host may choose fewer where it compiles.
        """
        edges = self.compiled.report.get("shapes", {}).get("buckets")
        buckets = {"buckets": edges} if edges else {}
        return self._run("accumulated", self.short, {**ALIKE, **buckets, "compile": "off"}, self._alike)

    @cached_property
    def big_batch(self) -> TrialResult:
        """The first of them, as one batch."""
        samples = int(self.window["effective_batch"])
        settings = {**ALIKE, "compile": "off", "accumulate": 1, "buckets": "off"}
        return self._run("big batch", 1, settings, self._alike, micro_batch=samples)

    @cached_property
    def accumulated_unbucketed(self) -> TrialResult:
        """As `accumulated`, for one update at least, in the order of data that a big batch would have."""
        if not self.first.report["shapes"]["buckets"]:
            return self.accumulated
        return self._run("one window", 1, {**ALIKE, "compile": "off", "buckets": "off"}, self._alike)

    @cached_property
    def compiled(self) -> TrialResult:
        """As `accumulated`, through the compiler's front half."""
        settings = {**ALIKE, "compile": "on", "compile_backend": "aot_eager"}
        seen = [check for check in self._alike if check != "samples"]  # a hook of the model would break its graph
        return self._run("compiled", self.short, settings, tuple(seen))

    @cached_property
    def slower(self) -> TrialResult:
        """The first updates at a tenth of the learning rate."""
        return self._run("slower", self.short, PLAIN, ("rate:0.1",))

    @cached_property
    def scanned(self) -> dict[float, TrialResult]:
        """A factor of the learning rate each."""
        return {
            rate: self._run(f"rate x {rate:g}", min(SCAN, self.job.updates), PLAIN, (f"rate:{rate}",))
            for rate in self.job.rates
        }

    @property
    def window(self) -> dict[str, Any]:
        """The report's facts on the first trial's windows."""
        return dict(self.first.report.get("window", {}))

    @property
    def accumulate(self) -> int:
        """Micro-batches an update."""
        return int(self.window.get("accumulate", 1))

    @property
    def short(self) -> int:
        """Updates of the trials beside the first."""
        return min(SHORT, self.job.updates)

    @property
    def _alike(self) -> tuple[str, ...]:
        return ("no_dropout", f"start:{self.job.folder.absolute() / 'start.pt'}", "samples", "gradient")

    def _run(
        self, name: str, updates: int, settings: dict[str, Any], checks: tuple[str, ...], micro_batch: int | None = None
    ) -> TrialResult:
        folder = self.job.folder.absolute() / name.replace(" ", "_")
        request = TrialRequest(updates, folder, micro_batch, settings, checks=checks)
        job = self.job
        result = run(job.command, request, job.timeout, progress=lambda line: job.progress(name, line))
        if result.ended is Ended.INTERRUPTED:
            raise KeyboardInterrupt
        return result


def difference(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The relative difference of two updates' gradients, |g1 - g2| / |g2|, estimated; None where one was not seen."""
    if not one.get("gradient") or not other.get("gradient"):
        return None
    (_, *first), (_, *second) = one["gradient"], other["gradient"]
    scale = one["norm"] / other["norm"] if other["norm"] else float(bool(one["norm"]))
    squares = [(a * scale - b) ** 2 for a, b in zip(first, second, strict=True)]
    return float((sum(squares) / len(squares)) ** 0.5)


def why_not(result: TrialResult) -> str:
    """Why a trial made no update, or empty."""
    if result.updates:
        return ""
    words = result.last_line.removeprefix("accel-plugins: ").removeprefix("accel: ")[:160]
    return f"{result.ended.value}{f': {words}' if words and result.ended is Ended.FAILED else ''}"
