"""What a hand-written loop does between its micro-batches: validate, ship weights, save, resume, end."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from integrations.contract import Outcome, Session
from plugins.core import checkpoint
from plugins.core.checkpoint import loop_checkpoint
from plugins.core.step.ema import EMA
from plugins.core.system.sharding import reshard, whole
from plugins.core.telemetry.losses import thinned
from plugins.errors import AccelError
from plugins.loop.checks import check_accumulate, check_optimizer, check_schedule
from plugins.loop.micro_batches import LoopStep
from plugins.loop.tuning import LoopTuning
from plugins.trial_run import loop as trial

LOGGED = 4000  # points of a loss that are kept; of longer curves the means of neighbours


class LoopRun(ABC):
    """The part of `plugins.loop.Accelerated` that trains nothing; that class builds every attribute.

    Attributes:
        session: the run.
        average: the moving average of the weights, or None.
    """

    session: Session
    average: EMA | None
    _given: nn.Module
    _host_clip_norm: float | None
    _bare: nn.Module
    _step: LoopStep
    _tuning: LoopTuning
    _validating: bool

    @abstractmethod
    def flush(self) -> Outcome | None:
        """Closes a window that is not full."""

    # -- what a loop may exchange while it runs ------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """As the user gave it; `_bare` is the module inside, whose names the files have. Another one is another run."""
        return self._given

    @model.setter
    def model(self, model: nn.Module) -> None:
        if model is not self._given:  # `accel.model = accel.model.to(...)` gives the same one
            raise AccelError(
                f"model={type(model).__name__}: a run keeps its model; end() it, and build another Accelerated"
            )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that steps; another one may be set, and a schedule of its own with it."""
        return self.session.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.session.use(optimizer, self.session.scaler, self._host_clip_norm)

    @property
    def scheduler(self) -> Any:
        """Stepped once an update, or None; another one may be set."""
        return self._step.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        check_schedule(scheduler)
        self._step.scheduler = scheduler

    @property
    def accumulate(self) -> int:
        """Micro-batches an update; may be set between two windows."""
        return self.session.window.expected

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        check_accumulate(count)
        window = self.session.window
        if not window.empty:
            raise AccelError(
                f"accumulate={count}: a window is open ({window.micro_batches} of {window.expected} micro-batches); "
                "call flush() before"
            )
        self.session.resize(count, count, self.session.report.window.effective_batch // window.expected)

    # -- validation ----------------------------------------------------------------------------------------------

    @contextmanager
    def validation(self) -> Iterator[nn.Module]:
        """The model in eval mode, with the averaged weights where there is an EMA; all is put back after it."""
        modes, self._validating = {module: module.training for module in self.model.modules()}, True
        swapped = self.average.swapped() if self.average is not None else nullcontext()
        try:
            with self.session.validation(), swapped, torch.no_grad():
                try:
                    self.model.eval()
                    yield self.model
                finally:  # before the weights: `eval` may have merged into them what `train` takes out
                    self.model.train(modes[self.model])
                    for module, training in modes.items():
                        module.training = training
        finally:
            self._validating = False
            self.session.training_mode()

    def train(self, mode: bool = True) -> None:
        """As `model.train()`; BatchNorm layers that the settings freeze stay in eval mode with either."""
        self.model.train(mode)
        self.session.training_mode()

    def weights(self) -> dict[str, Tensor]:
        """What to ship: the averaged weights where there is an EMA, else the live ones; the model's own names.

        Those of a sharded model are gathered on the CPU: all ranks call it.
        """
        reshard(self._bare)
        with self.average.swapped() if self.average is not None else nullcontext():
            found = checkpoint.own_state(self._bare)
            found = {n: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for n, v in found.items()}
            return whole(found)  # type: ignore[no-any-return]

    def log_loss(self, *, train: float | Tensor | None = None, valid: float | Tensor | None = None) -> None:
        """Tell the report a loss as of now, for its picture and its word on overfitting; training goes on unchanged.

        Args:
            train: a mean over training samples; a tensor is read, which waits for its device.
            valid: a mean over validation samples.

        Raises:
            AccelError: not one number.
        """
        losses = self.session.report.losses
        for name, value in (("train", train), ("valid", valid)):
            if value is None:
                continue
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise AccelError(f"log_loss: {name}={value!r}: expected one number") from None
            curve = getattr(losses, name)
            curve.append((self.session.updates, number))
            if len(curve) > LOGGED:
                curve[:] = thinned(curve, LOGGED // 2)

    # -- save and resume -----------------------------------------------------------------------------------------

    def save(self, path: str | Path, **extra: Any) -> Path:
        """Write everything that a bit-for-bit resume needs, atomically.

        The weights lie under "model" with the model's own names; the file loads with `weights_only=True`. With a model
        that is sharded over ranks all of them call it, and the first one writes the whole.

        Args:
            path: of the file.
            **extra: plain values and tensors of yours, which `resume` gives back.

        Returns:
            The path.

        Raises:
            AccelError: something in `extra` that could not be loaded in this way.
        """
        live = self.average.unswapped() if self.average is not None else nullcontext()  # also inside `validation`
        with live, self._step.gradients_inside():
            opened = {"tuned": True} if self._tuning.opened else {}
            loop_checkpoint.save(target := trial.file(path), self.session, self.scheduler, extra=extra, **opened)
        return target

    def resume(self, path: str | Path) -> dict[str, Any]:
        """Go on where `save` stopped, random state included.

        Args:
            path: of a file that `save` wrote, of the same model and optimizer.

        Returns:
            What `save` was given as `extra`.

        Raises:
            AccelError: a missing, damaged or foreign file, or one of another model; nothing is changed then.
        """
        with loop_checkpoint.damage_named(Path(path)):
            state = loop_checkpoint.belonging(Path(path), self.session, self.scheduler)
        if state.get("tuned"):
            self._tuning.measure()
        with loop_checkpoint.damage_named(Path(path)):
            self._step.load(state)
        self._tuning.resume()
        with loop_checkpoint.damage_named(Path(path)):
            checkpoint.set_random_state(state["random"])
        return dict(state["extra"])

    def end(self, folder: str | Path | None = None) -> Path | None:
        """Take everything off the model, and write the report; safe to call twice.

        Args:
            folder: where accel_report.* and accel_plan.json go; None writes none.

        Returns:
            The path of accel_report.json, or None where none was written.
        """
        return self.session.end(trial.folder(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        self.end()
