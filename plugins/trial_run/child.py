"""The child's side of a trial: writes down every update of a session, and ends the process at the last one.

A job is ended by `SystemExit`, raised where its last update is over: every host lets it through, closes what it holds
open and writes its report, and no code of the user's that would follow the training runs. What is looked at beside the
updates, where `TrialRequest.checks` names it: see `plugins.trial_run.probes`.
"""

from __future__ import annotations

import os
from atexit import register as at_exit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from plugins.core.session import Session
from plugins.core.step.update import Outcome
from plugins.core.system import devices
from plugins.core.system.memory import in_use_gib
from plugins.core.system.shortage import GIB
from plugins.core.telemetry.observer import Observer
from plugins.trial_run.probes import probes
from plugins.trial_run.request import TrialRequest, current, note


class TrialOver(SystemExit):
    """The updates that were asked for are done."""


def watched(session: Session) -> Session:
    """The same session, which a trial looks at where this process is one."""
    request = current()
    if request is not None:
        session.recorder.observer = Watch(session, request)
    return session


class Watch(Observer):
    """Of one session. The first of several ranks writes; all of them end at the same update."""

    def __init__(self, session: Session, request: TrialRequest) -> None:
        self.session, self.request = session, request
        self._losses: list[tuple[Tensor, float | Tensor]] = []
        self._done = False
        self.probes = [made(session, note) for made in probes(request.checks)]
        if request.memory_gib is not None:
            devices.limit(session.device, int(request.memory_gib * GIB))
        facts = session.report
        held = in_use_gib(session.device)
        begun = {"host": facts.host, "device": session.device.type, "kind": facts.memory.kind, "pid": os.getpid()}
        note(begun=begun | {"held_gib": held})
        self.resized(facts.window.micro_batch)
        for probe in self.probes:
            probe.begin()
        at_exit(self.ended)  # a loop that fails ends nothing

    @override
    def arrived(self, first: bool) -> None:
        for probe in self.probes:
            probe.arrived(first)

    @override
    def loss(self, value: Tensor, weight: float | Tensor) -> None:
        self._losses.append((value.detach(), weight))
        for probe in self.probes:
            probe.loss(value)

    @override
    def resized(self, micro_batch: int) -> None:
        note(micro_batch=micro_batch)

    @override
    @contextmanager
    def validating(self) -> Iterator[None]:
        before = in_use_gib(self.session.device)
        yield
        note(validation={"before_gib": before, "after_gib": in_use_gib(self.session.device)})

    @override
    def closed(self, outcome: Outcome) -> None:
        if self._done:
            return
        session, series = self.session, self.session.series
        extra: dict[str, Any] = {}
        for probe in self.probes:
            extra |= probe.closed(outcome)
        note(
            update=session.updates - 1,
            loss=self._mean_loss(),
            norm=outcome.norm,
            stepped=outcome.stepped,
            clipped=outcome.clipped,
            samples=outcome.samples,
            micro_batches=outcome.micro_batches,
            seconds=series.seconds[-1],
            wait=series.waits[-1],
            memory_gib=series.memory[-1],
            rates=[float(group["lr"]) for group in session.optimizer.param_groups],
            **extra,
        )
        if session.updates >= self.request.updates:
            self._end()
            raise TrialOver(0)

    @override
    def ended(self) -> None:
        """The job has come to its own end before the limit, or to an error."""
        if not self._done and self.session.updates:
            self._end()

    def _end(self) -> None:
        self._done = True
        for probe in self.probes:
            probe.end()
        session = self.session
        session.write_report(Path(self.request.folder))
        memory = session.report.memory
        peaks = [p for p in (memory.first_step_peak_gib, memory.steady_peak_gib) if p is not None]
        note(
            end=True,
            report=session.report.data(),
            peak_gib=max(peaks, default=None),
            first_step_peak_gib=memory.first_step_peak_gib,
            steady_peak_gib=memory.steady_peak_gib,
        )

    def _mean_loss(self) -> float | None:
        losses, self._losses = self._losses, []
        weights = [float(weight) for _, weight in losses]
        total = sum(weights)
        if not total:
            return None
        with torch.no_grad():
            return sum(float(value.sum()) * weight for (value, _), weight in zip(losses, weights, strict=True)) / total
