"""The search over a user's command, and the rescue where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plugins.core.step.precision import bf16_is_fast
from plugins.core.system.memory import free_gib
from plugins.find_batch.advice import Advice, advise, with_argument
from plugins.find_batch.forecast import Forecast
from plugins.find_batch.rescue import AUTOCAST, STEPS, Step, Tried, rescue, taken
from plugins.find_batch.search import Measurement, Outcome, Search, divisors
from plugins.find_batch.sizes import shown
from plugins.find_batch.trials import Trials

SAFE = 0.9  # of what is free: a rescue is measured also where it does not fit, but the machine must stay well


@dataclass
class Found:
    """What a search came to.

    Attributes:
        limit_gib: what the training may take.
        effective_batch: samples an update, or None where the job's own accumulation stays.
        best: the largest micro-batch that was measured to fit; None where nothing did.
        measured: all measurements of the search.
        forecast: the line through them.
        settled: nothing larger would have been worth a trial.
        tried: the rescue, where it was needed.
    """

    limit_gib: float
    effective_batch: int | None
    best: Measurement | None
    measured: list[Measurement]
    forecast: Forecast | None
    settled: bool
    tried: list[Tried] = field(default_factory=list)

    @property
    def kept(self) -> list[Step]:
        """Steps of the rescue that the answer needs."""
        return [one.step for one in self.tried if one.kept]

    def verdict(self, one: Measurement) -> str:
        """Of one row."""
        if one.outcome is Outcome.SHORT:
            return str(one.outcome.value)
        if self.best is not None and one.micro_batch == self.best.micro_batch:
            return "taken"
        return "fits" if one.fits(self.limit_gib) else "too much"

    def verdict_of(self, one: Tried) -> str:
        """Of one step of the rescue."""
        if one.measured is None:
            return one.why
        if one.measured.fits(self.limit_gib):
            return "fits"
        return "too much" if one.kept else "no help, left out"

    def lines(self) -> list[str]:
        """What to say of it."""
        if self.best is None:
            return [f"nothing here fits into {shown(self.limit_gib)}"]
        size, said = self.best.micro_batch, []
        if self.effective_batch is not None:
            said.append(f"{size} x {self.effective_batch // size} = {self.effective_batch} samples an update")
        if self.forecast is not None and self.forecast.sample_gib > 0 and not self.tried:
            most = self.forecast.largest(self.limit_gib, 10**6)
            said.append(
                f"by the forecast the limit is at about {max(most, size)}, {shown(self.forecast.sample_gib)} a sample"
            )
        if not self.settled:
            said.append("the trials were used up: a larger one may fit too")
        if self.effective_batch is not None and size == 1 < self.effective_batch:
            said.append(
                f"{self.effective_batch} has no other divisor that fits; another effective batch may allow more"
            )
        return said

    def advice(self, command: Sequence[str], host: str) -> Advice:
        """The command to use."""
        assert self.best is not None
        settings: dict[str, Any] = taken(self.kept)
        settings.pop("accumulate", None)
        if self.effective_batch is not None:
            settings["effective_batch"] = self.effective_batch
        changed, by_hand = list(command), []
        for step in self.kept:
            laid = with_argument(changed, step.arguments)
            changed = laid or changed
            if step.advice and laid is None:
                by_hand.append(step.advice)
        made = advise(changed, self.best.micro_batch, settings, host)
        return Advice(made.command, made.environment, [*made.by_hand, *by_hand])


def find(trials: Trials, device: torch.device, most: int) -> Found:
    """The largest micro-batch of a command that fits, with a rescue where none does.

    Args:
        trials: of the command, with the limit and the effective batch.
        device: that the job trains on.
        most: the largest micro-batch to look at where no effective batch bounds it.

    Raises:
        AccelError: see `Trials.measure`.
    """
    wanted, limit = trials.effective_batch, trials.limit_gib
    candidates: Sequence[int] = divisors(wanted) if wanted else range(1, most + 1)
    search = Search(candidates, limit, exact=wanted is not None)
    best = search.run(trials.measure)
    if best is not None:
        return Found(limit, wanted, best, search.measured, search.forecast, search.settled)
    safe = max(limit, free_gib(device) * SAFE)

    def taking(steps: Sequence[Step]) -> dict[str, Any]:
        laid = [with_argument(trials.command, step.arguments) for step in steps]
        command = trials.command
        for step in steps:
            command = with_argument(command, step.arguments) or command
        checks = [name for step, one in zip(steps, laid, strict=True) if one is None for name in step.checks]
        return {"settings": taken(steps), "checks": checks, "command": command}

    slow = {} if bf16_is_fast(device) else {AUTOCAST: "no bf16 instructions here"}  # emulated, it takes minutes
    tried = rescue(
        lambda steps: trials.measure(candidates[0], limit_gib=safe, **taking(steps)), search.usable_gib, STEPS, slow
    )
    measured = search.measured
    last = tried[-1].measured
    if last is None or not last.fits(search.usable_gib):
        return Found(limit, wanted, None, measured, search.forecast, True, tried)
    kept = taking([one.step for one in tried if one.kept])
    kept["settings"].pop("accumulate", None)  # of each micro-batch's own
    search = Search(candidates, limit, exact=wanted is not None, measured=[last])
    best = search.run(lambda size: trials.measure(size, **kept))
    return Found(limit, wanted, best, [*measured, *search.measured], search.forecast, search.settled, tried)
