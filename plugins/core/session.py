"""One training run: owns the parts and the order of an update; answers the seam's hooks.

micro_batch -> plan -> forward in autocast through the compiled callable -> loss x weight -> backward
-> window closes -> schedule's rate -> unscale -> rescale -> finite? -> clip -> step -> zero -> EMA
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core import checkpoint
from plugins.core.autotune.plan_cache import PlanCache, default_folder
from plugins.core.autotune.plan_file import Start
from plugins.core.autotune.timing import Trial, WindowStart, attributes_kept, buffers_kept
from plugins.core.autotune.tuner import Tuner
from plugins.core.checkpoint.run_state import RunState
from plugins.core.compile.compiled_module import CompiledModule
from plugins.core.compile.manager import CompileManager
from plugins.core.compile.monitor import CompileMonitor
from plugins.core.step.accumulation import ALL, Term, Window
from plugins.core.step.batchnorm import Statistics
from plugins.core.step.update import NonFiniteGradient, Outcome, Update
from plugins.core.system.malloc import FreedMemory
from plugins.core.system.memory import Peaks
from plugins.core.telemetry.recorder import Recorder
from plugins.core.telemetry.series import Series


class Session:
    """Answers `integrations.contract.Seam` for one run of one model.

    `say` shows a line to the user (a host's own logger).
    """

    files = checkpoint

    def __init__(self, config: AccelConfig, host: str, say: Callable[[str], None] = print) -> None:
        self.config = config
        self.recorder = Recorder(config, host, say)
        self.report, self.metrics = self.recorder.report, self.recorder.metrics
        self.window = Window()
        self._schedule: Callable[[int], None] | None = None
        self._start = Start()
        self._trying = self._ended = False

    # -- before the first batch -----------------------------------------------------------------------------------

    def start_plan(self, device: torch.device) -> tuple[str, str]:
        """Precision and memory format to begin with. What the settings leave open is measured later.

        Raises:
            precision.Unsupported: a precision that this device cannot train in.
            PlanError: a plan file that is none.
        """
        self._start = Start.of(self.config, device)
        return self._start.plan.precision, self._start.plan.memory_format

    def model_ready(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        micro_batch: int,
        size: int | None,
        expected: int = 1,
        clip_norm: float | None = None,
        scaler: Any = None,
        average: Any = None,
        groups: Mapping[str, Iterable[nn.Parameter]] | None = None,
        schedule: Callable[[int], None] | None = None,
        dims: Iterable[int] = (),
        takes: Callable[[tuple[Any, ...]], bool] = lambda args: True,
        sync: bool = False,
        uncompilable: str = "",
    ) -> None:
        """Build the parts. `model` is the bare module; `clip_norm` the host's own, which the settings override.

        Args:
            size: K, micro-batches an update; None where the host closes windows by its own rule.
            expected: K that the host's rule is expected to give.
            average: an object with `update()`, and `state_dict`/`load_state_dict` where it is to be resumed.
            dims: dimensions of the input that vary, for the compiler.
            takes: which calls of the model to compile.
            sync: reduce gradients over ranks here, once an update.
            uncompilable: why this model's forward cannot be compiled, where it cannot.
        """
        self.model, self.device, self._schedule = model, device, schedule
        self.window = Window(size, exact=self.config.normalise == "exact")
        self.window.expected = size or expected
        clip = self.config.clip_norm
        self.update = Update(
            optimizer,
            scaler=scaler,
            clip_norm=clip_norm if clip == "host" else None if clip == "off" else float(clip),
            nonfinite=self.config.nonfinite,
            groups=groups,
            average=average,
            sync=sync,
            keep_gradients=lambda: self.compilation.cuda_graphs,
            order=model.parameters(),
        )
        self.statistics = Statistics(model, self.config.batchnorm)
        self.statistics.apply(self.window.expected)
        self.peaks, self.freed = Peaks(device), FreedMemory(device)
        self.describe_window(micro_batch)
        self.recorder.begin(device, self.peaks, self.statistics, self.update.clip_norm, self.window.exact)
        cache = PlanCache(
            default_folder() if self.config.cache_dir == "auto" else Path(self.config.cache_dir), self.warn
        )
        if self.config.compile != "off":
            cache.use_for_compiler()
        self.compilation = CompileManager(
            self.config, model, device, self.report.compile, self.warn, dims, takes, uncompilable
        )
        self.metrics.series.compiled_at = self.compilation.compiled_at
        try:
            self.compilation.start()
        except BaseException:
            self.end()
            raise
        self._cache = cache
        self.tuner = Tuner(self, model, device, self._start, cache, self.compilation)

    def open_plan(self, start: Start) -> None:
        """Begin with another plan than was said, before the first micro-batch."""
        self._start = start
        self.tuner = Tuner(self, self.model, self.device, start, self._cache, self.compilation)

    def describe_window(self, micro_batch: int) -> None:
        """Tell the report the sizes in force (again after a host changed its batch)."""
        self.recorder.sizes(self.window.expected, micro_batch)

    # -- plan and compile -----------------------------------------------------------------------------------------

    def plan_window(self, trial: Trial, left: int, shape: Iterable[int]) -> None:
        """At a window's first micro-batch, before its forward and outside autocast: let the planner try or switch."""
        if not self.tuner.waits:
            return
        began = time.perf_counter()
        self.tuner.at_window(WindowStart(trial, self.updates, left, tuple(shape), self.window.expected))
        self.metrics.forgive(time.perf_counter() - began)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What runs inside leaves no trace: window, buffers, plain attributes, gradients, random state.

        Those of the model and its optimizer, and the global generators. What a model or a loss keeps elsewhere is not
        known here, and moves with every trial: a criterion's BatchNorm, a generator of its own, a global list.
        """
        state, self._trying = checkpoint.random_state(), True
        try:
            with buffers_kept(self.model), attributes_kept(self.model):
                yield
        finally:
            self._trying = False
            self.clear_gradients()
            torch.clear_autocast_cache()
            checkpoint.set_random_state(state)

    def clear_gradients(self) -> None:
        """Also of a criterion's own parameters, which the optimizer holds beside the model's."""
        keep = self.update.keep_gradients()
        self.model.zero_grad(set_to_none=not keep)
        for parameter in self.update.parameters():
            if not keep:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def progress(self, text: str) -> None:
        sys.stderr.write(f"accel: {text}\n")

    def compile_validation(self, model: nn.Module) -> None:
        self.compilation.validation(model)

    @property
    def compiled(self) -> list[CompiledModule]:
        return self.compilation.parts

    @property
    def series(self) -> Series:
        return self.metrics.series

    @property
    def monitor(self) -> CompileMonitor:
        return self.compilation.monitor

    # -- a micro-batch and its window -----------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Windows that were closed, skipped updates included: the index of the next update."""
        return self.recorder.updates

    def micro_batch(self, samples: int, expected: int | None = None) -> None:
        self.arrived(expected)
        self.count(samples)

    def arrived(self, expected: int | None = None) -> None:
        """A micro-batch came from the loader; it is counted by `count`, once it is sure that it has a backward."""
        first = self.window.empty
        self.metrics.arrived(first)
        if first:
            self.statistics.keep()
            self.compilation.preallocate()  # what a host dropped: after a skipped step, or an error
            if expected is not None and self.window.size is None:
                self.window.expected = expected

    def count(self, samples: int) -> None:
        """A micro-batch of so many samples enters the window."""
        self.window.count(samples)
        self.report.window.micro_batches += 1

    def shape(self, shape: Iterable[int], padding: int = 0) -> None:
        self.metrics.shape(shape, padding)

    def mean(self, count: Tensor | float, group: str = ALL) -> Tensor | float:
        return 1.0 if self._trying else self.window.weigh({group: Term.mean(count)})[group]

    def batch_mean(self, images: int, targets: Tensor | float, group: str = ALL) -> Tensor | float:
        return 1.0 if self._trying else self.window.weigh({group: Term.batch_mean(images, targets)})[group]

    def share(self, group: str = ALL) -> Tensor | float:
        return 1.0 if self._trying else self.window.share(group)

    def backward_done(self) -> Outcome | None:
        return self.close() if self.window.full else None

    def idle(self) -> None:
        self.metrics.idle()
        self.tuner.stepped(self.metrics.last_seconds)

    def training_mode(self) -> None:
        self.statistics.apply(self.window.expected)

    def close(self) -> Outcome | None:
        return None if self.window.empty else self.join()

    def join(self) -> Outcome | None:
        """Close the window, or take part in the update of other ranks that have one; None where no rank has."""
        self._before_update()
        with self._statistics_kept():
            outcome = self.update.step(self.window)
        if outcome is not None:
            self.closed(outcome)
        else:
            self.window.close()
        return outcome

    def use(self, optimizer: torch.optim.Optimizer, scaler: Any, clip_norm: float | None) -> None:
        """What the host steps with from now on: a callback may have exchanged it. See `model_ready`."""
        self.update.optimizer, self.update.scaler = optimizer, scaler
        if self.config.clip_norm == "host":
            self.update.clip_norm = clip_norm

    def prepare(self) -> Outcome:
        """For hosts that step by themselves: gradients unscaled, exact, checked and clipped. After the host's step
        come `update.finish` and `closed`."""
        self._before_update()
        with self._statistics_kept():
            return self.update.prepare(self.window)

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """nonfinite=stop ends the run: BatchNorm's statistics are those of before the bad window."""
        try:
            yield
        except NonFiniteGradient:
            self.statistics.restore()
            raise

    def _before_update(self) -> None:
        if self._schedule is not None:
            self._schedule(self.updates)
        self.recorder.gradients(self.model)

    def closed(self, outcome: Outcome) -> None:
        """Bookkeeping after an update; called by hosts that step by themselves as well."""
        if not outcome.stepped:
            self.statistics.restore()
        self.recorder.closed(outcome, self.device)
        self.window.close()
        self.peaks.update_done()
        self.freed.update_done(self.peaks.first_gib or 0.0)
        self.compilation.hold_budget(self.updates)

    def drop(self) -> None:
        """Forget an unfinished window (the host threw its gradients away, or stopped after its last save)."""
        self.report.window.dropped_micro_batches += self.window.micro_batches
        self.window.close()

    # -- validation, checkpoints, end -----------------------------------------------------------------------------

    @contextmanager
    def validation(self) -> Iterator[None]:
        """At `validate=eager` calls of the live model run eagerly inside, and add no graph to training's."""
        eager = self.compilation.paused() if self.config.validate_ == "eager" else nullcontext()
        try:
            with eager, self.monitor.in_phase("validation"):
                yield
        finally:
            self.metrics.not_waiting()

    def run_state(self) -> RunState:
        """What a resume needs; a host leaves out the fields that its own checkpoint holds."""
        return RunState(self.config, self.model, self.update, self.window, self.statistics, self.recorder, self.tuner)

    def state_dict(self) -> dict[str, Any]:
        return self.run_state().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run_state().load_state_dict(state)

    def warn(self, text: str) -> None:
        self.recorder.warn(text)

    def approximate(self, term: str) -> None:
        self.recorder.approximate(term)

    def write_report(self, folder: Path) -> Path:
        """Write the report as it stands now, and the plan beside it."""
        self._sum_up()
        path = self.report.write(folder, self.metrics.series)
        if hasattr(self, "tuner"):
            self.tuner.write(folder)
        return path

    def end(self, folder: Path | None = None) -> Path | None:
        """Undo what was put on the model and write the report; returns its path. Safe to call twice.

        A report that cannot be written is a warning: a trained model is worth more.
        """
        if self._ended:
            return None
        self._ended = True
        path = None
        if hasattr(self, "tuner"):
            self.tuner.end()
        self._sum_up()
        if folder is not None:
            try:
                path = self.write_report(folder)
            except OSError as error:
                self.warn(f"report not written: {error}")
        if hasattr(self, "compilation"):
            self.compilation.end()
        if hasattr(self, "statistics"):
            self.statistics.undo()
            self.freed.release()
        return path

    def _sum_up(self) -> None:
        report = self.report
        self.recorder.sum_up()
        if hasattr(self, "tuner"):
            self.metrics.series.switched_at = [switch.update for switch in self.tuner.switches]
            self.compilation.sum_up()
            self.tuner.sum_up(report.speed, report.compile)
        if hasattr(self, "peaks"):
            self.peaks.end()
            report.memory.allocator = self.freed.kept or "host"
            report.memory.first_step_peak_gib = self.peaks.first_gib
            report.memory.steady_peak_gib = self.peaks.steady_gib
        if hasattr(self, "update") and self.update.average is not None:
            report.ema.updates = int(getattr(self.update.average, "updates", 0))
