"""The parent's side of a trial: starts the user's command with a request, watches its memory, and reads the record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from plugins.core.system.shortage import GIB, says_short
from plugins.core.system.signals import sigterm_as_ctrl_c
from plugins.trial_run.command import prepared
from plugins.trial_run.request import VARIABLE, TrialRequest

LOOK_EVERY = 0.05  # s
GRACE = 5.0  # s that a job has to end by itself, before it is killed
TAIL = 40  # lines


class Ended(Enum):
    """How a trial came to its end."""

    COMPLETE = "complete"  # the updates that were asked for, or all that the job has
    NO_TRAINING = "no training"  # the job ended, without an update of a plug's
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial.

    Attributes:
        code: the child's exit code; negative: the signal that ended it.
        ended: how.
        records: the lines of the child's record, in order.
        peak_gib: the most memory, GiB: of the device where the job trains on one, else resident, of all its processes.
        stderr: the last lines of the child's standard error.
    """

    code: int
    ended: Ended
    records: list[dict[str, Any]] = field(default_factory=list)
    peak_gib: float = 0.0
    stderr: str = ""

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """One a closed window: update, loss, norm, stepped, seconds, wait, samples, memory_gib, rates, ..."""
        return [line for line in self.records if "update" in line]

    @cached_property
    def report(self) -> dict[str, Any]:
        """As in accel_report.json; empty where the trial made no update."""
        return dict(next((line["report"] for line in reversed(self.records) if "report" in line), {}))

    def fact(self, name: str) -> Any:
        """The value of the last line that has this name, or None."""
        return next((line[name] for line in reversed(self.records) if name in line), None)

    @property
    def last_line(self) -> str:
        """The last words of the job's standard error: the error's own line, mostly."""
        return next((line.strip() for line in reversed(self.stderr.splitlines()) if line.strip()), "")


def run(
    command: Sequence[str],
    request: TrialRequest,
    timeout: float = 600.0,
    memory_limit: float | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> TrialResult:
    """Run the user's own command as a trial; nothing of it is left running.

    Args:
        command: as the user would type it; see `plugins.trial_run.command.prepared`.
        request: what is asked for. Earlier lines of its record are removed.
        timeout: s, after which the job is ended.
        memory_limit: GiB. The child may take no more of its accelerator; on a CPU it is ended once its processes hold
            more. None sets no limit.
        progress: told of every line of the record as it comes.

    Returns:
        How it ended, and what was written down. Ctrl-C or SIGTERM end the job, and are told as `Ended.INTERRUPTED`.

    Raises:
        AccelError: the command is none, or of no training, or of a script without the plug; one line.
    """
    argv = prepared(command)
    if memory_limit is not None:
        request = TrialRequest(**{**vars(request), "memory_gib": memory_limit})
    environment = {**os.environ, VARIABLE: str(request.write())}
    lines = request.lines
    lines.unlink(missing_ok=True)
    folder = request.folder
    job = _Job(lines, memory_limit, progress)
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as error:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=error, env=environment, start_new_session=True
        )
        try:
            with sigterm_as_ctrl_c():
                ended = job.watch(child, time.monotonic() + timeout)
        except KeyboardInterrupt:
            ended = Ended.INTERRUPTED
        finally:
            _end_group(child)
    job.read()
    words = "\n".join((folder / "stderr.log").read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
    code = child.returncode
    return TrialResult(code, ended or _judged(code, job.records, words), job.records, job.peak_gib, words)


class _Job:
    """A running trial, as seen from outside."""

    def __init__(self, lines: Path, limit: float | None, progress: Callable[[dict[str, Any]], None] | None) -> None:
        self.lines, self.limit, self.progress = lines, limit, progress
        self.records: list[dict[str, Any]] = []
        self.resident_gib = 0.0
        self._read = 0

    def watch(self, child: subprocess.Popen[bytes], until: float) -> Ended | None:
        """Until the job ends, or has to be; None where it ended by itself."""
        while child.poll() is None:
            self.resident_gib = max(self.resident_gib, _resident_gib(child.pid))
            self.read()
            if self.limit is not None and self.on_cpu and self.resident_gib > self.limit:
                return Ended.OUT_OF_MEMORY
            if time.monotonic() > until:
                return Ended.TIMEOUT
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LOOK_EVERY)
        return None

    def read(self) -> None:
        """Take up whole lines that were written since."""
        if not self.lines.is_file():
            return
        with self.lines.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self.records.append(json.loads(line))
            if self.progress is not None:
                self.progress(self.records[-1])

    @property
    def on_cpu(self) -> bool:
        """Whether the job has said that it trains in resident memory."""
        return any(line.get("begun", {}).get("kind") == "rss" for line in self.records)

    @property
    def peak_gib(self) -> float:
        """Of the device, as the child told it at its end; else resident."""
        own = next((line["peak_gib"] for line in reversed(self.records) if "peak_gib" in line), None) or 0.0
        return max(own, self.resident_gib) if self.on_cpu or not own else own


def _judged(code: int, records: list[dict[str, Any]], words: str) -> Ended:
    """How a job ended that was not ended from here."""
    sizes = [line["micro_batch"] for line in records if line.get("micro_batch")]
    if code == -signal.SIGKILL or any(later < earlier for earlier, later in pairwise(sizes)):
        return Ended.OUT_OF_MEMORY  # killed by the system, or a host that has halved its batch
    done = any("end" in line for line in records)
    if code != 0 and not done:
        return Ended.OUT_OF_MEMORY if says_short(words) else Ended.FAILED
    if not any("update" in line for line in records):
        return Ended.NO_TRAINING
    return Ended.COMPLETE if code == 0 else Ended.FAILED


def _resident_gib(pid: int) -> float:
    """Of a process and all that it started; of those only what is theirs alone: a fork shares its parent's memory."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        total = process.memory_info().rss
        for one in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += one.memory_full_info().uss
    return total / GIB


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """The job and all that it started: asked first, then killed."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # what is left of its group
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
