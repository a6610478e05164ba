"""One training run: owns the parts and the order of an update; answers the seam's hooks.

micro_batch -> forward in autocast through the compiled callable -> loss x weight -> backward
-> window closes -> schedule's rate -> unscale -> rescale -> finite? -> clip -> step -> zero -> EMA
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core import checkpoint
from plugins.core import compile as compiling
from plugins.core.batchnorm import SMALL_MICRO_BATCH, Statistics
from plugins.core.memory import Peaks
from plugins.core.report import Report, Series
from plugins.core.shapes import Marker, Seen
from plugins.core.update import NonFiniteGradient, Outcome, Resumable, Update
from plugins.core.watch import Watch
from plugins.core.window import ALL, Term, Window

WITHOUT_GRADIENT_SHOWN = 20
SKIPS_SHOWN = 5


class Session:
    """Answers `integrations.seam.Seam` for one run of one model.

    `say` shows a line to the user (a host's own logger).
    """

    files = checkpoint

    def __init__(self, config: AccelConfig, host: str, say: Callable[[str], None] = print) -> None:
        self.config, self.say = config, say
        self.report = Report(host, config.dump())
        self.series = Series()
        self.seen = Seen()
        self.window = Window()
        self.watch = Watch(self._compile_progress)
        self.compiled: list[compiling.InPlace] = []
        self._validated: list[compiling.InPlace] = []
        self._schedule: Callable[[int], None] | None = None
        self._arrived = self._spent = self._idle_since = 0.0
        self._ended = False

    # -- model ready -------------------------------------------------------------------------------------------

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
        cuda_graphs = device.type == "cuda" and self.config.compile_mode in compiling.CUDA_GRAPH_MODES
        self.update = Update(
            optimizer,
            scaler=scaler,
            clip_norm=clip_norm if clip == "host" else None if clip == "off" else float(clip),
            nonfinite=self.config.nonfinite,
            groups=groups,
            average=average,
            sync=sync,
            keep_gradients=cuda_graphs and self.config.compile == "on",
            order=model.parameters(),
        )
        self.statistics = Statistics(model, self.config.batchnorm)
        self.statistics.apply(self.window.expected)
        self.peaks = Peaks(device)
        self._describe(micro_batch)
        self.watch.start()
        try:
            self._compile(dims, takes, uncompilable)
        except BaseException:
            self.end()
            raise

    def _describe(self, micro_batch: int) -> None:
        report = self.report
        report.device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        report.memory.kind = self.peaks.kind
        self.describe_window(micro_batch)
        report.window.exact = self.window.exact and not report.window.approximate_terms
        report.gradients.clip_norm = self.update.clip_norm
        report.batchnorm.layers = len(self.statistics.layers)
        report.batchnorm.rule = self.config.batchnorm
        report.compile.budget = self.config.recompile_budget
        report.compile.mode = self.config.compile_mode
        if self.statistics.layers and 0 < micro_batch < SMALL_MICRO_BATCH and self.config.batchnorm != "freeze":
            report.batchnorm.micro_batch_too_small = True
            self.warn(
                f"BatchNorm sees micro-batches of {micro_batch} (under {SMALL_MICRO_BATCH}): accumulation cannot make "
                "its statistics those of the big batch; batchnorm=freeze avoids it when fine-tuning"
            )

    def describe_window(self, micro_batch: int) -> None:
        """Tell the report the sizes in force (again after a host changed its batch)."""
        facts = self.report.window
        facts.accumulate, facts.micro_batch = self.window.expected, micro_batch
        facts.effective_batch = self.window.expected * micro_batch

    # -- compile ------------------------------------------------------------------------------------------------

    def _compile(self, dims: Iterable[int], takes: Callable[[tuple[Any, ...]], bool], reason: str) -> None:
        facts = self.report.compile
        if self.config.compile != "on":
            facts.reason = (
                "compile=off"
                if self.config.compile == "off"
                else "compile=auto stays eager: nothing has measured yet that compile pays here; compile=on compiles"
            )
            return
        reason = reason or compiling.missing_compiler(self.device, self.config.compile_backend)
        if reason:
            self._stay_eager(reason)
            return
        compiling.refuse_inside_autocast()
        if self.update.keep_gradients:
            compiling.preallocate_gradients(self.model)
        modules, facts.decision = self._scope()
        way = "static" if self.config.dynamic == "static" else "strict"
        for module in modules:
            part = compiling.InPlace(
                module,
                backend=self.config.compile_backend,
                mode=self.config.compile_mode,
                dynamic=False if self.config.dynamic == "static" else None,
                limit=self.config.recompile_budget,
                isolate=facts.decision == "whole",
                marker=Marker(dims, way),
                takes=takes,
                give_up=self._stay_eager,
            )
            part.install()
            self.compiled.append(part)
        facts.reason = "compile=on"

    def compile_validation(self, model: nn.Module) -> None:
        """Compile the model that validation runs, once, where `validate=compiled` asks; it falls back alone."""
        if self.config.validate_ != "compiled" or self.config.compile != "on":
            return
        if any(part.module is model for part in self._validated):
            return
        part = compiling.InPlace(
            model,
            backend=self.config.compile_backend,
            mode=self.config.compile_mode,
            limit=self.config.recompile_budget,
            give_up=lambda reason: self.warn(f"compile: validation runs eagerly: {reason}"),
        )
        part.install()
        self._validated.append(part)

    def _scope(self) -> tuple[list[nn.Module], str]:
        scope = self.config.compile_scope
        if isinstance(scope, list):
            modules = compiling.matching(self.model, scope, self.config.compile_exclude)
            if not modules:
                raise compiling.CompileRefused(f"compile_scope={','.join(scope)}: no module has such a name")
            return modules, "features"
        if scope == "regional":
            left_out = {id(m) for m in compiling.matching(self.model, self.config.compile_exclude, [])}
            blocks = [block for block in compiling.regions(self.model) if id(block) not in left_out]
            if not blocks:
                raise compiling.CompileRefused("compile_scope=regional: the model has no repeated blocks; use whole")
            return blocks, "regional"
        if self.config.compile_exclude:
            raise compiling.CompileRefused(
                f"compile_exclude={','.join(self.config.compile_exclude)}: the whole forward is one graph; "
                "use compile_scope=regional or name patterns"
            )
        return [self.model], "whole"

    def _stay_eager(self, reason: str) -> None:
        """An error of the compiler, or the budget: one warning, and the run goes on eagerly."""
        for part in self.compiled:
            part.undo()
        self.report.compile.decision, self.report.compile.reason = "eager", reason
        self.warn(f"compile: {reason}; the run goes on eagerly")

    def _hold_budget(self) -> None:
        if not any(part.active for part in self.compiled):
            return
        graphs = self.watch.graphs
        if graphs > len(self.series.compiled_at):
            new = graphs - len(self.series.compiled_at)
            self.series.compiled_at.extend([self.updates] * new)
        if graphs > self.config.recompile_budget:
            self._stay_eager(f"{graphs} graphs were built, over recompile_budget={self.config.recompile_budget}")
        elif fell := self.watch.fell_to_eager:
            self._stay_eager(f"torch stopped compiling {fell[0]} at its recompile limit")

    def _compile_progress(self, seconds: float, graphs: int, done: bool) -> None:
        text = f"accel: compiling, {seconds:.0f} s, {graphs} graphs built"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}{chr(10) if done else ''}")
            sys.stderr.flush()
        elif done or round(seconds) % 10 == 0:
            sys.stderr.write(f"{text}\n")

    # -- a micro-batch and its window -----------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Windows that were closed, skipped updates included: the index of the next update."""
        return self.report.window.updates + self.report.window.skipped_updates

    def micro_batch(self, samples: int, expected: int | None = None) -> None:
        now = time.perf_counter()
        if self._idle_since:
            self.series.waiting += now - self._idle_since
            self._idle_since = 0.0
        self._arrived = now
        if self.window.empty:
            self._spent = 0.0
            self.statistics.keep()
            if expected is not None and self.window.size is None:
                self.window.expected = expected
        self.window.count(samples)
        self.report.window.micro_batches += 1

    def shape(self, shape: Iterable[int], padding: int = 0) -> None:
        sizes = tuple(shape)
        self.seen.add(sizes, padding, math.prod(sizes))

    def mean(self, count: Tensor | float, group: str = ALL) -> Tensor | float:
        return self.window.weigh({group: Term.mean(count)})[group]

    def batch_mean(self, images: int, targets: Tensor | float, group: str = ALL) -> Tensor | float:
        return self.window.weigh({group: Term.batch_mean(images, targets)})[group]

    def share(self, group: str = ALL) -> Tensor | float:
        return self.window.share(group)

    def backward_done(self) -> Outcome | None:
        return self.close() if self.window.full else None

    def idle(self) -> None:
        self._idle_since = now = time.perf_counter()
        self._spend(now)

    def _spend(self, now: float) -> None:
        """Add the micro-batch under way to its window's time: validation and waiting between them is not a step's."""
        if self._arrived:
            self._spent += now - self._arrived
            self._arrived = 0.0

    def training_mode(self) -> None:
        self.statistics.apply(self.window.expected)

    def close(self) -> Outcome | None:
        if self.window.empty:
            return None
        if self._schedule is not None:
            self._schedule(self.updates)
        if not self.series.seconds:
            self._without_gradient()
        try:
            outcome = self.update.step(self.window)
        except NonFiniteGradient:
            self.statistics.restore()
            raise
        self.closed(outcome)
        return outcome

    def closed(self, outcome: Outcome) -> None:
        """Bookkeeping after an update; called by hosts that step by themselves as well."""
        facts = self.report.window
        if outcome.stepped:
            facts.updates += 1
        else:
            facts.skipped_updates += 1
            self.statistics.restore()
            if facts.skipped_updates <= SKIPS_SHOWN:
                last = "; further ones are only counted" if facts.skipped_updates == SKIPS_SHOWN else ""
                self.warn(
                    f"update {self.updates - 1}: the gradient norm is {outcome.norm}; the update was skipped{last}"
                )
        facts.partial_windows += outcome.partial
        self._spend(time.perf_counter())
        self.series.seconds.append(self._spent)
        self.series.norms.append(outcome.norm)
        self.series.clipped += outcome.clipped
        self.series.samples += outcome.samples
        self.window.close()
        self.peaks.update_done()
        self._hold_budget()

    def drop(self) -> None:
        """Forget an unfinished window (the host threw its gradients away, or stopped after its last save)."""
        self.report.window.dropped_micro_batches += self.window.micro_batches
        self.window.close()

    def _without_gradient(self) -> None:
        names = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        self.report.gradients.without_gradient = names
        if names:
            shown = ", ".join(names[:WITHOUT_GRADIENT_SHOWN]) + (" ..." if len(names) > WITHOUT_GRADIENT_SHOWN else "")
            self.warn(f"{len(names)} trainable parameters got no gradient in the first update: {shown}")

    # -- validation, checkpoints, end -----------------------------------------------------------------------------

    @contextmanager
    def validation(self) -> Iterator[None]:
        """At `validate=eager` calls of the live model run eagerly inside, and add no graph to training's."""
        held = [part for part in self.compiled if part.active and self.config.validate_ == "eager"]
        for part in held:
            part.active = False
        try:
            with self.watch.in_phase("validation"):
                yield
        finally:
            for part in held:
                part.active = True
            self._idle_since = 0.0

    def state_dict(self) -> dict[str, Any]:
        average = self.update.average
        gradients = {} if self.window.empty else _gradients(self.model)
        return {
            "config": self.config.given(),
            "model": {name: t.detach() for name, t in self.model.state_dict().items()},
            "optimizer": self.update.optimizer.state_dict(),
            "scaler": self.update.scaler.state_dict() if self.update.scaler is not None else {},
            "average": average.state_dict() if isinstance(average, Resumable) else {},
            "window": self.window.state_dict(),
            "gradients": gradients,
            "kept_statistics": list(self.statistics._kept) if not self.window.empty else [],
            "counts": _counts(self.report),
            "random": checkpoint.random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.update.optimizer.load_state_dict(state["optimizer"])
        if self.update.scaler is not None and state["scaler"]:
            self.update.scaler.load_state_dict(state["scaler"])
        if state["average"] and isinstance(self.update.average, Resumable):
            self.update.average.load_state_dict(state["average"])
        self.window.load_state_dict(state["window"])
        parameters = dict(self.model.named_parameters())
        for name, gradient in state["gradients"].items():
            parameters[name].grad = gradient.to(parameters[name].device)
        self.statistics._kept = [t.to(self.device) for t in state["kept_statistics"]]
        for name, value in state["counts"].items():
            setattr(self.report.window, name, value)

    def warn(self, text: str) -> None:
        if text not in self.report.warnings:
            self.report.warnings.append(text)
            self.say(f"accel: {text}")

    def approximate(self, term: str) -> None:
        facts = self.report.window
        if term not in facts.approximate_terms:
            facts.approximate_terms.append(term)
            facts.exact = False

    def write_report(self, folder: Path) -> Path:
        """Write the report as it stands now."""
        self._sum_up()
        return self.report.write(folder, self.series)

    def end(self, folder: Path | None = None) -> Path | None:
        """Undo what was put on the model and write the report; returns its path. Safe to call twice.

        A report that cannot be written is a warning: a trained model is worth more.
        """
        if self._ended:
            return None
        self._ended = True
        path = None
        if folder is not None:
            try:
                path = self.write_report(folder)
            except OSError as error:
                self.warn(f"report not written: {error}")
        for part in (*self.compiled, *self._validated):
            part.undo()
        if hasattr(self, "statistics"):
            self.statistics.undo()
        self.watch.end()
        return path

    def _sum_up(self) -> None:
        report, series, watch = self.report, self.series, self.watch
        facts = report.compile
        facts.graphs, facts.recompiles = watch.graphs, watch.recompiles
        facts.recompile_reasons, facts.phases = watch.recompile_reasons, watch.phases()
        breaks = watch.graph_breaks
        facts.graph_breaks, facts.graph_break_reasons = sum(breaks.values()), list(breaks)
        facts.seconds, facts.cache = round(watch.seconds, 3), watch.cache() if self.compiled else ""
        facts.marking = self.compiled[0].marker.way if self.compiled else ""
        speed = report.speed
        speed.first_step_seconds = series.seconds[0] if series.seconds else None
        speed.step_seconds_median = series.median_seconds()
        total = sum(series.seconds)
        if total:
            speed.samples_per_second = series.samples / total
            speed.loader_wait_fraction = min(series.waiting / total, 1.0)
        if hasattr(self, "peaks"):
            self.peaks.end()
            report.memory.first_step_peak_gib = self.peaks.first_gib
            report.memory.steady_peak_gib = self.peaks.steady_gib
        report.shapes.seen = sorted([list(s) for s in self.seen.shapes])
        report.shapes.padding_fraction = self.seen.padding_fraction
        if series.norms:
            ordered = sorted(n for n in series.norms if n == n)
            report.gradients.norm_median = ordered[len(ordered) // 2] if ordered else None
            report.gradients.clipped_fraction = series.clipped / len(series.norms)
        if hasattr(self, "update") and self.update.average is not None:
            report.ema.updates = int(getattr(self.update.average, "updates", 0))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def _counts(report: Report) -> dict[str, int]:
    names = ("micro_batches", "updates", "partial_windows", "skipped_updates", "dropped_micro_batches")
    return {name: int(getattr(report.window, name)) for name in names}
