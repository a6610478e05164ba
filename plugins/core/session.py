"""One run: its parts, and what `integrations.contract.Session` declares. An update's order: `core.step.update`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plugins.core import checkpoint
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.autotune.plan_file import Start, write_switches
from plugins.core.autotune.run_guard import RunGuard
from plugins.core.autotune.timing import Trial, WindowStart
from plugins.core.autotune.tuner import Tuner
from plugins.core.autotune.user_hooks import hooked
from plugins.core.checkpoint.run_state import RunState
from plugins.core.compile.decision import TuningStage
from plugins.core.compile.manager import CompileManager
from plugins.core.step.accumulation import Window
from plugins.core.step.activation_checkpointing import ActivationCheckpointing
from plugins.core.step.batchnorm import Statistics
from plugins.core.step.rescue import Rescue
from plugins.core.step.run_spec import RunSpec
from plugins.core.step.update import Average, NonFiniteGradient, Outcome
from plugins.core.telemetry.recorder import Recorder

__all__ = ["RunSpec", "Session"]


class Session:
    """One run, complete once it is built from its `spec`.

    Raises:
        ValueError: CompileRefused, PlanError or precision.Unsupported, in one line; the model is as it was.
    """

    files = checkpoint

    def __init__(self, spec: RunSpec) -> None:
        config, model, device = spec.config, spec.model, spec.device
        start = Start.of(config, device)
        self.config, self.model, self.device, self._ended = config, model, device, False
        self.recorder = recorder = Recorder(config, spec.host, device, spec.say, spec.packages)
        self.report, self.metrics = recorder.report, recorder.metrics
        self.warn, self.approximate, self.loss = recorder.warn, recorder.approximate, recorder.loss
        self.series, self.shape, self.none_finite = self.metrics.series, self.metrics.shape, self.metrics.none_finite
        self.window = Window(spec.size, exact=config.normalise == "exact")
        self.window.expected = spec.size or spec.expected
        self.mean, self.batch_mean, self.share = self.window.mean, self.window.batch_mean, self.window.share
        self.update = spec.new_update(lambda: self.updates, lambda: self.compilation.cuda_graphs)
        self.parameters, self.beside_model = self.update.parameters, partial(self.update.beside, model)
        self.guard = RunGuard(model, self.update, self.window, recorder)
        self.statistics = Statistics(model, config.batchnorm)
        self.rescue = Rescue(self.guard, self.statistics, device)
        self.describe_window = self.rescue.describe  # again after a host changed its batch
        self.describe_window(spec.micro_batch)
        recorder.begin(self.statistics, self.update.clip_norm, self.window.exact)
        self._cache = PlanCache.of(config, self.warn)
        self.checkpointing = ActivationCheckpointing(config, model, device, self.warn)
        self.compilation = CompileManager(
            config, model, device, self.report.compile, self.warn, spec.dims, spec.takes, spec.uncompilable
        )
        self.monitor, self.compile_validation = self.compilation.monitor, self.compilation.validation
        self.series.compiled_at = self.compilation.compiled_at
        try:
            self.training_mode()
            self.checkpointing.start()
            self.compilation.start()
            self.open_plan(start)
        except BaseException:
            self._undo()
            raise

    def open_plan(self, start: Start) -> None:
        """Begin with another plan than was said, before the first micro-batch."""
        self.tuner = Tuner(self.guard, self.model, self.device, start, self._cache, self.compilation)

    # -- plan and compile -----------------------------------------------------------------------------------------

    def plan_window(self, trial: Trial, left: int, shape: Iterable[int]) -> None:
        """At a window's first micro-batch, before its forward and outside autocast: let the planner try or switch."""
        began = time.perf_counter()
        if self.waits and (name := hooked(self.model)):
            self.measure_nothing(f"{name} has a hook of the user's own, which a trial would run as well")
        self.tuner.at_window(WindowStart(trial, self.updates, left, tuple(shape), self.window.expected))
        self.metrics.forgive(time.perf_counter() - began)

    @property
    def waits(self) -> bool:
        """Whether `plan_window` may still try or switch something."""
        return self.tuner.waits

    @property
    def timing(self) -> bool:
        """Whether the run's own eager steps are timed now, and trials may follow."""
        return self.tuner.state is TuningStage.TIMING and not self.compilation.active

    @property
    def measured(self) -> bool:
        """Whether nothing is tried any more."""
        return self.tuner.measured

    @property
    def may_compile(self) -> bool:
        """Whether compiled code runs, or may run later."""
        return self.tuner.may_compile

    def measure_nothing(self, why: str) -> None:
        """No trial from now on."""
        self.tuner.measure_nothing(why)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one in force, see `use`."""
        return self.update.optimizer

    @property
    def scaler(self) -> Any:
        """The gradient scaler in force, or None."""
        return self.update.scaler

    @property
    def average(self) -> Average | None:
        """What is moved after every update."""
        return self.update.average

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients have to be zeroed in place now, as CUDA graphs need."""
        return self.update.keep_gradients()

    # -- a micro-batch and its window -----------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Windows that were closed, skipped updates included: the index of the next update."""
        return self.recorder.updates

    def micro_batch(self, samples: int, expected: int | None = None) -> None:
        """A micro-batch that has a backward came from the loader: `arrived` and `count`."""
        self.arrived(expected)
        self.count(samples)

    def arrived(self, expected: int | None = None) -> None:
        """A micro-batch came from the loader; it is counted by `count`, once it is sure that it has a backward."""
        first = self.window.empty
        self.recorder.arrived(first)
        if first:
            self.statistics.keep()
            self.compilation.preallocate()  # what a host dropped: after a skipped step, or an error
            if expected is not None and self.window.size is None:
                self.window.expected = expected

    def count(self, samples: int) -> None:
        """A micro-batch of so many samples enters the window."""
        self.window.count(samples)
        self.report.window.micro_batches += 1

    def backward_done(self) -> Outcome | None:
        """Run the update where the window is full; None where it is not."""
        return self.close() if self.window.full else None

    def idle(self) -> None:
        """The micro-batch is over; what follows until the next is waiting for data."""
        self.metrics.idle()
        self.tuner.stepped(self.metrics.last_seconds)

    def training_mode(self) -> None:
        """The host has set training mode: hold the BatchNorm rule."""
        self.statistics.apply(self.window.expected * self.rescue.pieces)

    def close(self) -> Outcome | None:
        """Run the update now; None where the window is empty."""
        return None if self.window.empty else self.join()

    def join(self) -> Outcome | None:
        """Close the window, or take part in the update of other ranks that have one; None where no rank has."""
        with self._update_begins():
            outcome = self.update.run_update(self.window)
        if outcome is not None:
            self._closed(outcome)
        self.window.close()
        return outcome

    def prepare_update(self) -> Outcome:
        """For hosts that step by themselves: everything up to the step. `finish_update` follows it."""
        with self._update_begins():
            outcome = self.update.prepare_update(self.window)
        assert outcome is not None, "an update of a window that no rank has"
        return outcome

    def engine_stepped(self, norm: float, stepped: bool) -> Outcome:
        """For hosts whose engine has done all that up to its step and the step. `finish_update` follows it."""
        with self._update_begins(held=False):
            return self.update.engine_stepped(self.window, norm, stepped)

    def finish_update(self, outcome: Outcome, averaged: bool = False) -> None:
        """The host has stepped, or skipped; `averaged`: it has moved the average itself."""
        if not averaged:
            self.update.finish_update(outcome)
        self._closed(outcome)
        self.window.close()

    @contextmanager
    def _update_begins(self, held: bool = True) -> Iterator[None]:
        """nonfinite=stop ends the run: BatchNorm's statistics are those of before the bad window."""
        self.recorder.gradients(self.model, held)
        try:
            with self.rescue.updating():
                yield
        except NonFiniteGradient:
            self.statistics.restore()
            raise

    def _closed(self, outcome: Outcome) -> None:
        if not outcome.stepped:
            self.statistics.restore()
        self.rescue.forget()
        self.recorder.closed(outcome)
        self.compilation.hold_budget(self.updates)
        self.checkpointing.window_closed(self.recorder.peaks.first_gib)

    def use(self, optimizer: torch.optim.Optimizer, scaler: Any, clip_norm: float | None) -> None:
        """What the host steps with from now on: a callback may have exchanged it. See `RunSpec`."""
        self.update.optimizer, self.update.scaler = optimizer, scaler
        if self.config.clip_norm == "host":
            self.update.clip_norm = clip_norm

    def resize(self, size: int | None, expected: int, micro_batch: int) -> None:
        """The host changed its batch: windows and samples from now on, as in `RunSpec`."""
        self.window.size, self.window.expected = size, size or expected
        self.describe_window(micro_batch)

    def drop(self) -> None:
        """Forget an unfinished window (the host threw its gradients away, or stopped after its last save)."""
        self.guard.drop()
        self.rescue.forget()

    # -- validation, checkpoints, end -----------------------------------------------------------------------------

    @contextmanager
    def validation(self) -> Iterator[None]:
        """At `validate=eager` calls of the live model run eagerly inside, and add no graph to training's."""
        eager = self.compilation.paused() if self.config.validate_ == "eager" else nullcontext()
        with eager, self.monitor.in_phase("validation"), self.recorder.validating():
            yield

    def run_state(self) -> RunState:
        """What a resume needs; a host leaves out the fields that its own checkpoint holds."""
        parts = (self.update, self.window, self.statistics, self.recorder, self.tuner, self.rescue)
        return RunState(self.config, self.model, *parts)

    def state_dict(self) -> dict[str, Any]:
        """All fields of `run_state`."""
        return self.run_state().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, random state excepted."""
        self.run_state().load_state_dict(state)

    def write_report(self, folder: Path) -> Path:
        """Write the report as it stands now, and the plan beside it; returns the path of its JSON."""
        self._sum_up()
        path = self.report.write(folder, self.metrics.series)
        write_switches(folder, self.tuner.start, self.tuner.switches)  # `plan=FILE` runs it without a trial
        return path

    def end(self, folder: Path | None = None) -> Path | None:
        """Undo what was put on the model and write the report (or warn); returns its path. Safe to call twice."""
        if self._ended:
            return None
        self._ended = True
        try:
            self.tuner.end()
            self._sum_up()
            return self.write_report(folder) if folder is not None else None
        except OSError as error:  # a warning only: a trained model is worth more
            self.warn(f"report not written: {error}")
            return None
        finally:
            self._undo()

    def _undo(self) -> None:
        self.compilation.end()
        self.checkpointing.undo()
        self.statistics.undo()
        self.recorder.end()

    def _sum_up(self) -> None:
        self.compilation.sum_up()
        self.tuner.sum_up(self.report.speed, self.report.compile)
        self.report.memory.checkpointing = self.checkpointing.standing
        self.metrics.series.switched_at = [switch.update for switch in self.tuner.switches]
        self.recorder.sum_up(self.update.average)
