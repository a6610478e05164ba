"""Accelerated: compile, autocast, accumulation, clipping, EMA, schedule, save and resume for a hand-written loop.

    accel = Accelerated(model, optimizer, accumulate=4, precision="auto", ema=0.999)
    for batch in accel.batches(loader):               # on the device; the last window is flushed
        accel.training_step(loss_of, batch)           # the fourth one is an update
    accel.end("runs/mine")

or, where forward and backward are to be seen:

    for images, labels in loader:
        with accel.forward(images, labels) as (images, labels):
            loss = criterion(model(images), labels)
        accel.backward(loss, weight=len(images))
    accel.flush()

Any model, any loss that is a mean over `weight` targets. An update is that of `optimizer.zero_grad()`, the backward of
the window as one big batch, clipping, `optimizer.step()`: gradients that other backward calls left are no part of it.
Several processes: initialise torch.distributed, give the bare model and each process its own batches; gradients are
reduced once an update. A model on which `fully_shard` was called reduces in every backward, by itself; its ranks need
equal counts of micro-batches, and all of them call `save` and `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from integrations import contract
from integrations.contract import Outcome
from integrations.precision_layout import LoopLayout
from integrations.shared.batch_size import micro_batches_per_update
from plugins.config import AccelConfig
from plugins.core import checkpoint
from plugins.core.autotune.plan_file import Start
from plugins.core.session import RunSpec, Session
from plugins.core.step.ema import EMA
from plugins.core.system.distributed import same_start
from plugins.core.system.sharding import holds_shards
from plugins.errors import AccelError, refusals_as_errors
from plugins.loop import nested
from plugins.loop.checks import bare_module, check_layout, check_model, check_optimizer, check_schedule, check_weight
from plugins.loop.deprecated import DeprecatedNames
from plugins.loop.micro_batches import LoopStep
from plugins.loop.out_of_memory import raise_short
from plugins.loop.replay import Replay
from plugins.loop.training_step import TrainingStep
from plugins.loop.tuning import LoopTuning, by_rule, may_measure, scale_rate, settings
from plugins.trial_run import loop as trial
from plugins.trial_run.child import watched


class Accelerated(TrainingStep, DeprecatedNames):
    """One training run of `model`, which stays the object it is.

    Args:
        model: the module, on its device, frozen parameters already frozen; also inside `torch.compile` or
            DataParallel, which then stay the loop's own (nothing more is compiled), but not DistributedDataParallel.
        optimizer: any torch optimizer that steps from gradients. Parameters that it holds beside the model's (a
            criterion's) are clipped, saved and resumed with them.
        micro_batch: samples a micro-batch; needed for `effective_batch`, and for the report.
        schedule: a function optimizer -> LRScheduler; stepped once an update, not by a skipped one.
        host_clip_norm: L2 norm where `clip_norm=host` (the default); None leaves gradients untouched then.
        dims: dimensions of the input that vary, for the compiler (3 is the width of [B, C, H, W]).
        tunes: this loop calls `tune` before the forward of every micro-batch. What the settings leave to `auto` then
            starts as a plain loop has it and is measured, as with `batches`; else precision and layout go by rule:
            bf16 where the device is fast in it, and with it channels_last for convolutions.
        planned: the deprecated name of `tunes`.
        host: name of the plug in the report.
        say: shows a line to the user.
        config: an accel.yaml, or an AccelConfig.
        **options: AccelConfig's fields.

    Raises:
        AccelError: an unknown option, a bad value, or a model, optimizer or option that cannot be served.
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
        tunes: bool = False,
        planned: bool | None = None,
        host: str = "loop",
        say: Callable[[str], None] = print,
        config: AccelConfig | str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if planned is not None:
            self.outdated("planned", "tunes=True, or batches and training_step")
        self._given, self._bare, self._host_clip_norm = model, bare_module(model), host_clip_norm
        check_model(self._bare)
        check_optimizer(optimizer)
        self.config = settings(config, options, wrapped=self._bare is not model)
        self.device = next(self._bare.parameters()).device
        self.world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self.config.seed != "host":
            checkpoint.seed_everything(int(self.config.seed))
        micro_batch = trial.micro_batch(micro_batch)
        accumulate = self._micro_batches_an_update(micro_batch)
        scale_rate(self.config, optimizer, accumulate)
        scheduler = schedule(optimizer) if schedule is not None else None
        check_schedule(scheduler)
        self._validating, self._fetched = False, (None, None)
        measured = bool(tunes or planned) and may_measure(self.config)
        from_file = isinstance(self.config.plan, Path)  # which says everything
        chosen = self.config if measured or from_file else by_rule(self.config, self._bare, self.device)
        self.layout = LoopLayout(self._bare, self.device)
        start = Start.of(chosen, self.device)
        check_layout(self._bare, start.memory_format)
        self.layout.apply(start.precision, start.memory_format)
        if self.world > 1:
            same_start(self._bare)
        wanted = self.config.ema not in ("host", "off")
        self.average = EMA(self._bare, float(self.config.ema)) if wanted else None
        spec = RunSpec(
            chosen,
            host,
            self._bare,
            optimizer,
            device=self.device,
            micro_batch=micro_batch or 0,
            size=accumulate,
            clip_norm=host_clip_norm,
            scaler=torch.amp.GradScaler(self.device.type) if start.in_fp16 else None,
            average=self.average,
            dims=dims,
            takes=lambda args: not self._validating or self.config.validate_ == "compiled",
            sync=self.world > 1,
            say=say,
        )
        self.session: contract.Session = watched(Session(spec))
        self._step = LoopStep(self.session, scheduler, self.world, holds_shards(self._bare))
        self._tuning = LoopTuning(self.config, self.session, self.layout, Replay(self._bare, self.place), measured)
        if self.world > 1:
            same_start(self.session.beside_model())
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

    def batches(self, loader: Iterable[Any], *, epochs_left: int = 1) -> Iterator[Any]:
        """Gives the loader's batches on the model's device, for `training_step`; closes the last window at the end.

        From the first call on, before anything was trained, what the settings leave to `auto` (compile, precision,
        memory format) is measured in the run's first micro-batches. A loop that is left early (`break`, an error)
        leaves its window open: the next batches go on with it, and `flush` closes it.

        Args:
            loader: anything that is iterated; without a length it counts as endless.
            epochs_left: how often it is still gone through, this time included: how long there is to win a trial back.
        """
        self._tuning.measure()
        loader = trial.loader(loader)
        for index, batch in enumerate(loader):
            self._tuning.left(loader, epochs_left, done=index)
            self._fetched = batch, self.place(batch)
            yield self._fetched[1]
        self._fetched = None, None
        self.flush()

    @contextmanager
    def forward(self, *inputs: Any, padding: int = 0) -> Iterator[Any]:
        """Gives the inputs on the model's device and in its memory format, and runs what is inside in autocast.

        The forward pass and the loss belong inside, backward outside. Several forwards before one backward are one
        micro-batch; a forward without backward is none. Inside `validation` and without gradients nothing is counted.

        Args:
            inputs: tensors, or nestings of them; the first tensor is the micro-batch, [B, ...].
            padding: elements of it that are padding.
        """
        training = not self._validating and torch.is_grad_enabled()
        if training:
            self._arrive(inputs, padding)
        placed = self.place(inputs)
        try:
            with self.autocast():
                yield placed[0] if len(placed) == 1 else placed
        except RuntimeError as error:
            if training:
                raise_short(error, nested.samples(inputs), self.updates)
            raise

    def place(self, value: Any) -> Any:
        """Any nesting of tensors, or what has a `.to`: on the model's device; tensors [B, C, H, W] in its layout."""

        def other(item: Any) -> Any:
            move = None if isinstance(item, (type, nn.Module)) else getattr(item, "to", None)
            return move(self.device) if callable(move) else item

        return nested.mapped(value, self.layout.moved, other)

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast in the precision in force; nothing in fp32."""
        return self.layout.autocast()

    def backward(self, loss: Tensor | Iterable[tuple[Tensor, float]], weight: float | Tensor) -> Outcome | None:
        """Backward of one micro-batch; the window's last one is an update, and then says what it came to.

        If it fails (out of memory), its window is dropped and counted, and no gradient of it stays.

        Args:
            loss: 0-dim mean over `weight` targets (samples, tokens, pixels). Or, where a micro-batch is too large for
                one forward, its parts one after the other: (mean loss, targets), each computed when it is asked for.
            weight: those targets; a window's update is the gradient of the mean over all its targets. A loss over 0
                targets, which may be NaN, adds nothing.
        """
        check_weight(weight)
        self._outside_autocast()
        return self._step.backward(loss, weight)

    def flush(self) -> Outcome | None:
        """Closes a window that is not full; None when it is empty.

        Over several ranks each calls it after its last batch: one that has run out takes part in the updates of those
        that have not, so ranks may have unequal counts of batches.
        """
        return self._step.flush()

    # -- what is measured ----------------------------------------------------------------------------------------

    def tune(self, loss: Callable[[], Tensor], left: float, shape: Iterable[int]) -> None:
        """Let what is `auto` be measured, for a loop that does not use `training_step`.

        Call it before the forward of every micro-batch, outside autocast. Without `tunes`, compile alone is measured.
        Only the first one of a window is used, and while there is something to decide; nothing of the run is touched.

        Args:
            loss: forward and loss of the micro-batch at hand; runs in autocast, possibly several times. It takes its
                inputs through `place`, so that they have the layout that is tried.
            left: micro-batches still to come, this one included; math.inf where the loader has no end.
            shape: of the input, [B, ...].
        """
        self._tuning.tune(loss, left, shape)

    # -- settings into facts -------------------------------------------------------------------------------------

    def _micro_batches_an_update(self, micro_batch: int | None) -> int:
        wanted = self.config.effective_batch
        if wanted != "host" and micro_batch is None:
            raise AccelError(f"effective_batch={wanted}: needs micro_batch, the samples that each backward sees")
        step = (micro_batch or 1) * self.world
        named = f"the {step} samples of one step (micro_batch x processes)"
        with refusals_as_errors():
            return micro_batches_per_update(self.config, step, host=1, named=named)

    def _describe(self) -> None:
        report = self.session.report
        report.config = self.config.dump()
        report.ema.decay = self.average.decay if self.average is not None else None
