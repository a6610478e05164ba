"""Measurements of the user's own command: short trainings in processes of their own, see `plugins.trial_run`."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plugins.errors import AccelError
from plugins.find_batch.search import Measurement, Outcome
from plugins.trial_run.launch import Ended, TrialResult, run
from plugins.trial_run.request import TrialRequest

# A trial is a few updates: no compile could be won back, and its worker's memory would be counted. What is found
# eagerly is compiled once, by the run itself.
EAGER = {"compile": "off", "validate": "eager"}
HELD = 2  # micro-batches an update: from the second one on, gradients lie beside activations
UPDATES = 4
TIMEOUT = 600.0  # s a trial


class Stopped(Exception):
    """The user has interrupted a trial."""


class Trials:
    """Trainings of one command, one after the other, each in a folder that is removed after it.

    Args:
        command: as the user typed it.
        folder: where the trials' folders are made.
        effective_batch: samples an update that the run is to have; None leaves the job's own accumulation.
        limit_gib: what a training may take before it is stopped.
        updates: of each trial.
        timeout: s of each trial.
        say: told what is being measured.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        effective_batch: int | None,
        limit_gib: float,
        updates: int = UPDATES,
        timeout: float = TIMEOUT,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.command, self.folder, self.effective_batch = list(command), folder, effective_batch
        self.limit_gib, self.updates, self.timeout, self.say = limit_gib, updates, timeout, say
        self.host = ""  # of the plug that the command uses, once a trial has run
        self._count = 0

    def measure(
        self,
        micro_batch: int,
        settings: Mapping[str, Any] | None = None,
        checks: Sequence[str] = (),
        limit_gib: float | None = None,
        command: Sequence[str] | None = None,
    ) -> Measurement:
        """Train for a few updates.

        Args:
            micro_batch: samples a micro-batch.
            settings: of accel, laid over the command's own.
            checks: what the child does beside, see `plugins.trial_run.probes`.
            limit_gib: another limit than the search's.
            command: another one than the search's.

        Raises:
            AccelError: the command is no training, failed, or took too long; one line.
            Stopped: by the user.
        """
        self._count += 1
        folder = self.folder / f"trial{self._count}"
        self.say(f"trial {self._count}: micro-batch {micro_batch}")
        request = TrialRequest(
            self.updates, folder, micro_batch, {**EAGER, **self._sizes(micro_batch), **(settings or {})},
            checks=tuple(checks),
        )  # fmt: skip
        try:
            result = run(command or self.command, request, self.timeout, limit_gib or self.limit_gib)
            return self._read(result, micro_batch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sizes(self, micro_batch: int) -> dict[str, Any]:
        if self.effective_batch is None:
            return {}
        return {"accumulate": min(max(self.effective_batch // micro_batch, 1), HELD)}

    def _read(self, result: TrialResult, micro_batch: int) -> Measurement:
        begun = result.fact("begun") or {}
        self.host = begun.get("host", self.host)
        if result.ended is Ended.OUT_OF_MEMORY:
            return Measurement(micro_batch, Outcome.OVER)
        if result.ended is Ended.INTERRUPTED:
            raise Stopped
        if result.ended is not Ended.COMPLETE:
            raise AccelError(f"command={' '.join(self.command)}: {self._why(result)}")
        updates = result.updates
        largest = max((_samples(one) for one in updates), default=0)
        if 0 < largest < micro_batch:
            return Measurement(micro_batch, Outcome.SHORT)
        steady = [one for one in updates[1:] if one.get("seconds") and one.get("micro_batches")]
        sample_seconds = [one["seconds"] / one["micro_batches"] / micro_batch for one in steady]
        return Measurement(
            micro_batch, Outcome.DONE, result.peak_gib, statistics.median(sample_seconds) if sample_seconds else None
        )

    def _why(self, result: TrialResult) -> str:
        if result.ended is Ended.NO_TRAINING:
            return (
                f"made no update of a plug's, so there is nothing to measure; {result.last_line or 'it said nothing'}"
            )
        if result.ended is Ended.TIMEOUT:
            return f"took longer than {self.timeout:.0f} s for {self.updates} updates; give a longer --timeout"
        return f"failed at micro-batch {result.fact('micro_batch')}: {result.last_line or f'exit code {result.code}'}"


def _samples(update: Mapping[str, Any]) -> float:
    """Samples of a micro-batch of this update; 0 where the host does not say."""
    samples, count = update.get("samples"), update.get("micro_batches")
    return samples / count if samples and count else 0
