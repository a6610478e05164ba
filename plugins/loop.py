"""Accelerated: compile, autocast, accumulation, clipping, EMA, schedule, save and resume for a hand-written loop.

    accel = Accelerated(model, optimizer, accumulate=4, precision="auto", ema=0.999)
    for images, labels in loader:
        with accel.forward(images, labels) as (images, labels):
            loss = criterion(model(images), labels)
        accel.backward(loss, weight=len(images))      # the fourth one is an update
    accel.end("runs/mine")

Any model, any loss that is a mean over `weight` targets. Several processes: initialise torch.distributed, give the
bare model and each process its own batches; gradients are reduced once an update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from integrations.layout import LoopLayout
from integrations.seam import UnsupportedRun, micro_batches
from plugins.config import AccelConfig
from plugins.core import checkpoint, precision, savefile
from plugins.core.compile import CompileRefused
from plugins.core.ema import EMA
from plugins.core.planfile import PlanError, Start
from plugins.core.ranks import same_start
from plugins.core.report import versions
from plugins.core.session import Session
from plugins.core.update import Outcome
from plugins.errors import AccelError

ENDLESS = 100_000  # micro-batches that a loop without an end is taken to have left: a hanging compile must end too


class Accelerated:
    """One training run of `model`, which stays the object it is.

    Args:
        model: the bare module, on its device, frozen parameters already frozen. Not a DistributedDataParallel.
        optimizer: any torch optimizer.
        micro_batch: samples a micro-batch; needed for `effective_batch`, and for the report.
        schedule: a function optimizer -> LRScheduler; stepped once an update.
        host_clip_norm: L2 norm where `clip_norm=host` (the default); None leaves gradients untouched then.
        dims: dimensions of the input that vary, for the compiler (3 is the width of [B, C, H, W]).
        planned: this loop calls `plan` before the forward of every micro-batch. What the settings leave to `auto` then
            starts as a plain loop has it and is measured; else precision and layout go by rule: bf16 where the device
            is fast in it, channels_last for convolutions.
        host: name of the plug in the report. say: shows a line to the user.
        config: an accel.yaml, or an AccelConfig. options: AccelConfig's fields.

    Raises:
        AccelError: an unknown option, a bad value, or one that this run cannot honour.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        micro_batch: int | None = None,
        schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        host_clip_norm: float | None = None,
        dims: Iterable[int] = (),
        planned: bool = False,
        host: str = "loop",
        say: Callable[[str], None] = print,
        config: AccelConfig | str | Path | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise AccelError("model=DistributedDataParallel: give the bare module; gradients are reduced here")
        if isinstance(config, AccelConfig):
            self.config = AccelConfig(**{**config.given(), **options}) if options else config
        else:
            self.config = AccelConfig(config, **options)
        self.model, self.optimizer = model, optimizer
        first = next(model.parameters(), None)
        if first is None:
            raise AccelError(f"model={type(model).__name__}: has no parameters to train")
        self.device = first.device
        self.world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self.config.seed != "host":
            checkpoint.seed_everything(int(self.config.seed))
        self.accumulate = self._micro_batches_an_update(micro_batch)
        self._scale_rate()
        self.scheduler = schedule(optimizer) if schedule is not None else None
        self._validating = self._entered = False
        self._planned = planned and self._measures()
        from_file = isinstance(self.config.plan, Path)  # which says everything
        chosen = self.config if self._planned or from_file else self._by_rule()
        self.session = Session(chosen, host, say)
        self.layout = LoopLayout(model, self.device)
        try:
            self.layout.apply(*self.session.start_plan(self.device))
            if self.world > 1:
                same_start(model)
            self.average = EMA(model, float(self.config.ema)) if self.config.ema not in ("host", "off") else None
            self.session.model_ready(
                model,
                optimizer,
                device=self.device,
                micro_batch=micro_batch or 0,
                size=self.accumulate,
                clip_norm=host_clip_norm,
                scaler=torch.amp.GradScaler(self.device.type) if Start.of(chosen, self.device).in_fp16 else None,
                average=self.average,
                dims=dims,
                takes=lambda args: not self._validating or self.config.validate_ == "compiled",
                sync=self.world > 1,
            )
        except (CompileRefused, PlanError, precision.Unsupported) as error:
            raise AccelError(str(error)) from None
        self._describe()

    # -- training ------------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Windows closed so far, skipped ones included."""
        return self.session.updates

    @property
    def dtype(self) -> torch.dtype | None:
        """Of autocast, as it is in force; None in fp32."""
        return self.layout.dtype

    def plan(self, loss: Callable[[], Tensor], left: float, shape: Iterable[int]) -> None:
        """Let what is `auto` be measured (without `planned`: compile alone); call it before the forward of every
        micro-batch, outside autocast.

        Only the first one of a window is used, and while there is something to decide; nothing of the run is touched.

        Args:
            loss: forward and loss of the micro-batch at hand; runs in autocast, possibly several times. It takes its
                inputs through `moved`, so that they have the layout that is tried.
            left: micro-batches still to come, this one included; math.inf where the loader has no end.
            shape: of the input, [B, ...].
        """
        if not isinstance(left, Real) or math.isnan(left):
            raise AccelError(f"plan: left={left!r}: expected the micro-batches still to come, or math.inf")
        if self.session.window.empty and self.session.planner.waits:
            self.session.plan_window(self.layout.at(partial(_checked, loss)), int(max(min(left, ENDLESS), 0)), shape)

    @contextmanager
    def forward(self, *inputs: Tensor, padding: int = 0) -> Iterator[Any]:
        """Gives the inputs on the model's device and in its memory format, and runs what is inside in autocast.

        The first input is the micro-batch, [B, ...], `padding` of its elements being padding. The forward pass and
        the loss belong inside, backward outside. Inside `validation` nothing is counted.
        """
        if inputs and not self._validating:
            self._enter(inputs[0].shape[0])
            self.session.shape(inputs[0].shape, padding)
        moved = [self.moved(value) for value in inputs]
        with self.autocast():
            yield moved[0] if len(moved) == 1 else tuple(moved)

    def _enter(self, samples: int) -> None:
        if not self.session.report.window.micro_batch:
            self.session.describe_window(samples)
        self.session.micro_batch(samples)
        self._entered = True

    def moved(self, value: Tensor) -> Tensor:
        """On the model's device and, where it has four dimensions, in the layout in force."""
        return self.layout.moved(value)

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast in the precision in force; nothing in fp32."""
        return self.layout.autocast()

    def backward(self, loss: Tensor | Iterable[tuple[Tensor, float]], weight: float | Tensor) -> Outcome | None:
        """Backward of one micro-batch; the window's last one is an update, and then says what it came to.

        Args:
            loss: 0-dim mean over `weight` targets (samples, tokens, pixels). Or, where a micro-batch is too large for
                one forward, its parts one after the other: (mean loss, targets), each computed when it is asked for.
            weight: those targets; a window's update is the gradient of the mean over all its targets.
        """
        if not isinstance(weight, Tensor) and not (isinstance(weight, Real) and 0 <= weight < math.inf):
            raise AccelError(f"backward: weight={weight!r}: expected a count of targets, 0 or more")
        if torch.is_autocast_enabled(self.device.type):
            raise AccelError("backward: called inside autocast; leave accel.forward first, backward belongs outside")
        if not self._entered:
            self._enter(int(weight))
        self._entered = False
        factor = self.session.mean(weight)
        if self.world > 1 and self.session.window.weighted:
            factor = factor * self.world  # the core averages gradients over ranks; the big batch's are their sum
        scaler = self.session.update.scaler
        for part, targets in [(loss, weight)] if isinstance(loss, Tensor) else loss:
            share = factor if targets is weight else factor * (targets / weight)
            weighted = part * share if isinstance(share, Tensor) or share != 1.0 else part
            (scaler.scale(weighted) if scaler is not None else weighted).backward()
        outcome = self._closed(self.session.backward_done())
        self.session.idle()
        return outcome

    def flush(self) -> Outcome | None:
        """Closes a window that is not full; None when it is empty."""
        return self._closed(self.session.close())

    def _closed(self, outcome: Outcome | None) -> Outcome | None:
        if outcome is not None and self.scheduler is not None:
            self.scheduler.step()
        return outcome

    # -- validation ----------------------------------------------------------------------------------------------

    @contextmanager
    def validation(self) -> Iterator[nn.Module]:
        """The model in eval mode, with the averaged weights where there is an EMA; all is put back after it."""
        training, self._validating = self.model.training, True
        swapped = self.average.swapped() if self.average is not None else nullcontext()
        try:
            with self.session.validation(), swapped, torch.no_grad():
                self.model.eval()
                yield self.model
        finally:
            self._validating = False
            self.train(training)

    def train(self, mode: bool = True) -> None:
        """Training mode; BatchNorm layers that the settings freeze stay in eval mode."""
        self.model.train(mode)
        self.session.statistics.apply(self.accumulate)

    def weights(self) -> dict[str, Tensor]:
        """What to ship: the averaged weights where there is an EMA, else the live ones; the model's own names."""
        with self.average.swapped() if self.average is not None else nullcontext():
            found = self.model.state_dict()
            return {n: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for n, v in found.items()}

    # -- save and resume -----------------------------------------------------------------------------------------

    def save(self, path: str | Path, **extra: Any) -> Path:
        """Writes everything that a bit-for-bit resume needs, atomically; `extra` holds plain values and tensors.

        The weights lie under "model" with the model's own names; the file loads with `weights_only=True`.

        Raises:
            AccelError: something in `extra` that could not be loaded in this way.
        """
        savefile.check_plain(extra)
        with self.average.unswapped() if self.average is not None else nullcontext():  # also inside `validation`
            self._save(Path(path), extra)
        return Path(path)

    def _save(self, path: Path, extra: dict[str, Any]) -> None:
        state = {**self.session.state_dict(), "kinds": savefile.kinds(self.optimizer, self.scheduler), "extra": extra}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        savefile.write(path, state)
        if str(path) not in self.session.report.checkpoints:
            self.session.report.checkpoints.append(str(path))

    def resume(self, path: str | Path) -> dict[str, Any]:
        """Goes on where `save` stopped, random state included; returns `extra`.

        Raises:
            AccelError: a missing, damaged or foreign file, or one of another model; nothing is changed then.
        """
        state = savefile.read(Path(path))
        savefile.refuse_other(Path(path), state, self.model, self.optimizer, self.scheduler)
        if bool(state["average"]) != (self.average is not None):
            there = "with" if state["average"] else "without"
            raise AccelError(f"ema={self.config.ema}: {path} was saved {there} an EMA; resume with the same setting")
        self.session.load_state_dict(state)
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if self._planned:  # at once: the window may be half done
            self.session.plan_window(self.layout, 0, ())
        checkpoint.set_random_state(state["random"])
        return dict(state["extra"])

    def end(self, folder: str | Path | None = None) -> Path | None:
        """Takes everything off the model and writes accel_report.* into `folder`; safe to call twice."""
        return self.session.end(Path(folder) if folder is not None else None)

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        self.end()

    # -- settings into facts -------------------------------------------------------------------------------------

    def _micro_batches_an_update(self, micro_batch: int | None) -> int:
        wanted = self.config.effective_batch
        if wanted == "host":
            return 1 if self.config.accumulate == "host" else int(self.config.accumulate)
        if micro_batch is None:
            raise AccelError(f"effective_batch={wanted}: needs micro_batch, the samples that each backward sees")
        try:
            return micro_batches(wanted, micro_batch * self.world, "micro_batch x processes")
        except UnsupportedRun as error:
            raise AccelError(str(error)) from None

    def _scale_rate(self) -> None:
        if self.config.lr_scale == "off":
            return
        factor = self.accumulate if self.config.lr_scale == "linear" else math.sqrt(self.accumulate)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def _measures(self) -> bool:
        """Whether a planned loop has a use for the planner: ranks would have to agree on what they measure, and at
        `compile=on` every candidate would be compiled anew."""
        return isinstance(self.config.plan, Path) or (
            self.config.plan == "auto" and self.config.compile != "on" and self.world == 1
        )

    def _by_rule(self) -> AccelConfig:
        """The settings with precision and layout resolved for this device."""
        try:
            dtype = precision.resolve(self.config.precision, self.device)
        except precision.Unsupported as error:
            raise AccelError(str(error)) from None
        convolutions = any(isinstance(module, nn.Conv2d) for module in self.model.modules())
        wanted = self.config.memory_format != "host" and convolutions
        layout = "channels_last" if wanted else "host"
        return self.config.model_copy(update={"precision": dtype, "memory_format": layout})

    def _describe(self) -> None:
        report = self.session.report
        report.versions = versions()
        report.config = self.config.dump()
        report.ema.decay = self.average.decay if self.average is not None else None


def _checked(loss: Callable[[], Tensor]) -> Tensor:
    value = loss()
    if not isinstance(value, Tensor):
        raise AccelError(f"plan: the loss function returned {type(value).__name__}; it has to return the loss")
    return value
