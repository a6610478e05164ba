"""What is told of a run: to its user in lines, each once, and in its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plugins.config import AccelConfig
from plugins.core.step.batchnorm import SMALL_MICRO_BATCH, Statistics
from plugins.core.step.update import Outcome
from plugins.core.system import devices
from plugins.core.system.malloc import FreedMemory
from plugins.core.system.memory import Peaks, in_use_gib, limit_gib
from plugins.core.telemetry.observer import Observer
from plugins.core.telemetry.report import Report, versions
from plugins.core.telemetry.step_metrics import StepMetrics

WITHOUT_GRADIENT_SHOWN = 20
SKIPS_SHOWN = 5
SKIPS_IN_A_ROW = 20  # fp16's scaler may skip some ten at the start, until it has found its scale
COUNTS = ("micro_batches", "updates", "partial_windows", "skipped_updates", "dropped_micro_batches")


class Recorder:
    """Fills the report while a run goes on.

    Args:
        config: the settings.
        host: the plug's name.
        device: of the model.
        say: shows a line to the user.
        packages: distributions whose versions the report names.
    """

    def __init__(
        self,
        config: AccelConfig,
        host: str,
        device: torch.device,
        say: Callable[[str], None],
        packages: tuple[str, ...] = (),
    ) -> None:
        self.config, self.device, self.say = config, device, say
        self.report = Report(host, config.dump(), versions=versions(*packages), device=devices.name(device))
        self.peaks, self.freed = Peaks(device), FreedMemory(device)
        self.metrics = StepMetrics()
        self.observer = Observer()

    def warn(self, text: str) -> None:
        """Tell the user, and keep the line in the report; the same text only once."""
        if text not in self.report.warnings:
            self.report.warnings.append(text)
            self.say(f"accel: {text}")

    def approximate(self, term: str) -> None:
        """This part of the loss is not that of the big batch."""
        facts = self.report.window
        if term not in facts.approximate_terms:
            facts.approximate_terms.append(term)
            facts.exact = False

    # -- at the start ---------------------------------------------------------------------------------------------

    def begin(self, statistics: Statistics, clip_norm: float | None, exact: bool) -> None:
        """The sizes are known: see `sizes`."""
        report = self.report
        report.memory.kind, report.memory.limit_gib = self.peaks.kind, limit_gib(self.device)
        report.window.exact = exact and not report.window.approximate_terms
        report.gradients.clip_norm = clip_norm
        report.batchnorm.layers = len(statistics.layers)
        report.batchnorm.rule = self.config.batchnorm
        micro_batch = report.window.micro_batch
        if statistics.layers and 0 < micro_batch < SMALL_MICRO_BATCH and self.config.batchnorm != "freeze":
            report.batchnorm.micro_batch_too_small = True
            self.warn(
                f"BatchNorm sees micro-batches of {micro_batch} (under {SMALL_MICRO_BATCH}): accumulation cannot make "
                "its statistics those of the big batch; batchnorm=freeze avoids it when fine-tuning"
            )

    def sizes(self, micro_batches: int, micro_batch: int, effective_batch: int) -> None:
        """An update's micro-batches, the samples of one, and those of the update."""
        facts = self.report.window
        facts.accumulate, facts.micro_batch, facts.effective_batch = micro_batches, micro_batch, effective_batch
        self.observer.resized(micro_batch)

    def out_of_memory(self, micro_batch: int) -> None:
        """Memory ran out in the update that is under way; micro-batches have so many samples since."""
        facts = self.report.memory
        count = facts.out_of_memory.get("count", 0) + 1
        facts.out_of_memory = {"count": count, "update": self.updates, "micro_batch": micro_batch}

    # -- while it runs --------------------------------------------------------------------------------------------

    def arrived(self, first: bool) -> None:
        """A micro-batch came from the loader; `first` of its window."""
        self.metrics.arrived(first)
        self.observer.arrived(first)

    def loss(self, value: Tensor, weight: float | Tensor = 1.0) -> None:
        """The loss of the micro-batch at hand, a mean over `weight` targets."""
        self.observer.loss(value, weight)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Validation runs inside; its time is no waiting for data."""
        try:
            with self.observer.validating():
                yield
        finally:
            self.metrics.not_waiting()

    @property
    def updates(self) -> int:
        """Windows that were closed, skipped updates included: the index of the next update."""
        return self.report.window.updates + self.report.window.skipped_updates

    def gradients(self, model: nn.Module, held: bool = True) -> None:
        """Before the first update: what is trained, and which of its parameters got no gradient.

        Args:
            model: the bare module.
            held: whether parameters hold their gradients now; an engine may have taken them away.
        """
        if self.metrics.series.seconds:
            return
        self.report.model = type(model).__name__
        self.report.parameters = sum(p.numel() for p in model.parameters() if not is_lazy(p))
        names = [n for n, p in model.named_parameters() if held and p.requires_grad and p.grad is None]
        self.report.gradients.without_gradient = names
        if names:
            shown = ", ".join(names[:WITHOUT_GRADIENT_SHOWN]) + (" ..." if len(names) > WITHOUT_GRADIENT_SHOWN else "")
            self.warn(f"{len(names)} trainable parameters got no gradient in the first update: {shown}")

    def closed(self, outcome: Outcome) -> None:
        """A window is over."""
        facts = self.report.window
        if outcome.stepped:
            facts.updates += 1
        else:
            facts.skipped_updates += 1
            if facts.skipped_updates <= SKIPS_SHOWN:
                last = "; further ones are only counted" if facts.skipped_updates == SKIPS_SHOWN else ""
                self.warn(
                    f"update {self.updates - 1}: the gradient norm is {outcome.norm}; the update was skipped{last}"
                )
        facts.partial_windows += outcome.partial
        self.metrics.closed(outcome, in_use_gib(self.device))
        if not outcome.stepped and self.metrics.none_finite(SKIPS_IN_A_ROW):
            self.warn(
                f"{SKIPS_IN_A_ROW} updates in a row were skipped: every gradient was not finite; lower the learning "
                "rate, or see the gradient norms in the report"
            )
        self.peaks.update_done()
        self.freed.update_done(self.peaks.first_gib or 0.0)
        self.observer.closed(outcome)

    def state_dict(self) -> dict[str, int]:
        """What was counted so far, for a checkpoint; a resumed run goes on from it."""
        return {name: int(getattr(self.report.window, name)) for name in COUNTS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put back the counts that `state_dict` gave."""
        for name in COUNTS:
            setattr(self.report.window, name, state[name])

    # -- at the end -----------------------------------------------------------------------------------------------

    def sum_up(self, average: Any) -> None:
        """Write the run's figures into the report; `average` is that of the weights, or None."""
        report, peaks = self.report, self.peaks
        peaks.end()
        self.metrics.sum_up(report.speed, report.shapes, report.gradients)
        if advice := self.metrics.advice():
            self.warn(advice)
        report.memory.allocator = self.freed.kept or "host"
        report.memory.first_step_peak_gib, report.memory.steady_peak_gib = peaks.first_gib, peaks.steady_gib
        if average is not None:
            report.ema.updates = int(getattr(average, "updates", 0))

    def end(self) -> None:
        """The run is over: let go of what was held for it."""
        self.freed.release()
        self.observer.ended()
