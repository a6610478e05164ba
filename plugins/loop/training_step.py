"""A micro-batch as one call, which can therefore be made again: where memory runs out, in smaller pieces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from integrations.contract import Outcome
from plugins.core.step.rescue import TOLD
from plugins.errors import AccelError
from plugins.loop import nested
from plugins.loop.checks import check_weight
from plugins.loop.micro_batches import Part
from plugins.loop.out_of_memory import Weight, whole_or_weighed, why_whole
from plugins.loop.run import LoopRun

LossFunction = Callable[[Any], "Tensor | None"]


class TrainingStep(LoopRun):
    """The part of `plugins.loop.Accelerated` that runs a whole micro-batch."""

    device: torch.device
    world: int
    _fetched: tuple[Any, Any]  # by `batches`, the latest: as the loader gave it, and placed

    @abstractmethod
    def place(self, value: Any) -> Any:
        """On the model's device, in the layout in force."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in force."""

    def training_step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        weight: Weight | Callable[[Any], Weight] | None = None,
    ) -> Tensor | None:
        """Forward, loss and backward of one micro-batch; the window's last one is an update.

        The loss function runs once; an error of its own leaves the batch out. Where something is to be measured, the
        model alone is called again, in the way that the loss called it. Where memory runs out, the window is done
        again with half the micro-batch, and from then on the loss function runs once for each piece of a batch.

        Args:
            loss_fn: batch -> 0-dim mean loss over `weight` targets, run in autocast; None leaves the batch out.
            batch: of `batches`, or any nesting of tensors; it is moved to the device and into the layout in force.
            weight: targets of the loss (samples, tokens, pixels), or a function of the batch that counts them;
                default: the first dimension of the first tensor.

        Returns:
            The loss, detached; None where it was left out.

        Raises:
            AccelError: a loss function that returns no loss, a batch without a tensor and no `weight`, or too little
                memory for a batch that cannot be divided; then it is a `torch.OutOfMemoryError` as well.
        """
        self._tuning.before(batch)
        missing = weight is None and not any(tensor.dim() for tensor in nested.tensors(batch))

        def parts(batch: Any) -> list[Part]:
            pieces = whole_or_weighed(batch, 0 if missing else weight, self.session.rescue.limit)
            return [(partial(self._loss, loss_fn, piece, missing), targets) for piece, targets in pieces]

        raw, placed = self._fetched
        held = raw if batch is placed else batch  # until the window closes: not on the device, where there is a choice
        loss, _ = self.run_parts(partial(parts, batch), batch, partial(parts, held), partial(why_whole, held, weight))
        return loss

    def run_parts(
        self,
        parts: Callable[[], list[Part]],
        inputs: Any,
        again: Callable[[], list[Part]] | None = None,
        cannot: Callable[[], str] = lambda: "",
        padding: int = 0,
    ) -> tuple[Tensor | None, Outcome | None]:
        """One micro-batch in parts, each with a forward and a backward of its own.

        Args:
            parts: gives (forward, targets) of each: `forward` returns its mean loss over those targets, or None.
            inputs: the micro-batch: its first tensor is [B, ...].
            again: gives them once more where memory ran out, of at most `session.rescue.limit` samples each.
            cannot: why they cannot be smaller, or empty.
            padding: elements of the input that are padding.

        Returns:
            The mean loss, detached, or None without one; and what an update came to, where this closed a window.
        """
        self._outside_autocast()
        rescue, samples, again = self.session.rescue, nested.samples(inputs), again or parts
        rescue.note(partial(self._backward, again), samples, lambda: self._waiting() or cannot())
        self._arrive(inputs, padding)
        limit = rescue.limit
        try:
            loss = rescue.guarded(partial(self._backward, parts))
        except BaseException as error:
            if self._step.begun or rescue.limit != limit or isinstance(error, TOLD):
                self._step.failed()
            else:  # the loss function's own error, which the loop may catch: what the window holds stays
                rescue.left_out()
                self._step.leave_out()
            raise
        if loss is None:
            rescue.left_out()
            self._step.leave_out()
            return None, None
        return loss, self._step.finish()

    def _backward(self, parts: Callable[[], list[Part]]) -> Tensor | None:
        found = parts()
        for _, targets in found:
            check_weight(targets)
        total = found[0][1] if len(found) == 1 else sum(targets for _, targets in found)
        return self._step.run(found, total)

    def _loss(self, loss_fn: LossFunction, piece: Any, missing: bool) -> Tensor | None:
        with self._tuning.noting():
            placed = self.place(piece)
            with self.autocast():
                loss = loss_fn(placed)
        if loss is None:
            return None
        if not isinstance(loss, Tensor):
            raise AccelError(f"training_step: the loss function returned {type(loss).__name__}, not the loss")
        if missing:
            raise AccelError(f"training_step: a batch of type {type(piece).__name__} holds no tensor; give weight=")
        self._tuning.after()
        return loss

    def _waiting(self) -> str:
        """Why ranks cannot divide their batches each by itself, or empty."""
        found = self.world > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in self._bare.modules())
        return "SyncBatchNorm: ranks would wait for each other" if found else ""

    def _arrive(self, inputs: Any, padding: int) -> None:
        """The micro-batch is here; the first tensor is its input."""
        first = next(nested.tensors(inputs), None)
        if first is not None:
            self._step.arrive(nested.samples(inputs))
            self.session.shape(first.shape, padding)

    def _outside_autocast(self) -> None:
        if torch.is_autocast_enabled(self.device.type):
            raise AccelError("backward: called inside autocast; leave accel.forward first, backward belongs outside")
