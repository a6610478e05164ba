"""The micro-batches of a hand-written loop: what is counted, whose gradients a window holds, and when it closes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from integrations.contract import Outcome, Session
from plugins.core.step.gradients import WindowGradients
from plugins.errors import AccelError
from plugins.loop.checks import check_loss
from plugins.loop.out_of_memory import raise_short

Part = tuple[Callable[[], Tensor | None], "float | Tensor"]  # forward and loss, and the targets that it is a mean over
FOREIGN = (
    "gradients that another backward left in the model between forward and accel.backward are no part of the update, "
    "as after optimizer.zero_grad(); add that loss to the one that accel.backward is given"
)


class LoopStep:
    """Of one run.

    Args:
        session: the run, its parts built.
        scheduler: stepped once an update that happened, or None.
        world: ranks.
        sharded: whether the model's parameters are, over the ranks.
    """

    def __init__(self, session: Session, scheduler: Any, world: int, sharded: bool) -> None:
        self.session, self.scheduler, self.world, self._sharded = session, scheduler, world, sharded
        self._gradients = WindowGradients(session.parameters, lambda: session.keeps_gradients)
        self._arrived: int | None = None  # samples of the micro-batch that has had a forward, and no backward yet
        self._begun = False  # the micro-batch has had a backward, and is not counted yet
        session.rescue.held_by(again=self._gradients.drop)

    def arrive(self, samples: int) -> None:
        """A forward begins; the first since the last backward is the micro-batch's."""
        if self._arrived is None:
            self._gradients.clear()
            self.session.arrived()
            self.session.training_mode()  # the loop may have set it
            self._arrived = samples
            if not self.session.report.window.micro_batch:
                self.session.describe_window(samples)

    def leave_out(self) -> None:
        """The micro-batch gets no backward."""
        self._arrived, self._begun = None, False

    def backward(self, loss: Tensor | Iterable[tuple[Tensor, float]], weight: float | Tensor) -> Outcome | None:
        """See `Accelerated.backward`."""
        if self._arrived is None:
            self.arrive(int(weight))
        self._put_in()
        try:
            for part, targets in _parts(loss, weight):
                self._weighted_backward(part, targets, weight)
        except BaseException as error:
            samples = self._arrived or 0
            self.failed()
            raise_short(error, samples, self.session.updates)
            raise
        return self.finish()

    def run(self, parts: Iterable[Part], total: float | Tensor) -> Tensor | None:
        """Forward and backward of a micro-batch's parts, one after the other; no update.

        Args:
            parts: a forward that gives None is left out.
            total: their targets together.

        Returns:
            The mean loss, detached; None where all of them were left out.
        """
        found: list[tuple[Tensor, float | Tensor]] = []
        for forward, targets in parts:
            if self._gradients.inside_parameters:
                self._gradients.take_out()
            loss = forward()
            if loss is not None:
                self._put_in()
                self._weighted_backward(loss, targets, total)
                found.append((loss.detach(), targets))
        return _mean(found)

    def finish(self) -> Outcome | None:
        """The micro-batch has had its backward: it is counted, and may close the window."""
        samples, self._arrived, self._begun = self._arrived or 0, None, False
        self.session.count(samples)
        if not self._gradients.inside_parameters:
            self._gradients.put_in()
        outcome = self._closed(self.session.backward_done())
        if outcome is None:
            self._gradients.take_out()
        self.session.idle()
        return outcome

    @property
    def begun(self) -> bool:
        """Whether the micro-batch at hand has had a backward."""
        return self._begun

    def failed(self) -> None:
        """An error in a backward: the window is dropped, and no gradient of it stays."""
        if self._begun:
            self.session.count(self._arrived or 0)
        self._arrived, self._begun = None, False
        self.session.drop()
        self._gradients.drop()

    def _put_in(self) -> None:
        if self._gradients.put_in(first=self.session.window.empty and not self._begun):
            self.session.warn(FOREIGN)
        self._begun = True

    def _weighted_backward(self, loss: Tensor, targets: float | Tensor, total: float | Tensor) -> None:
        check_loss(loss)
        window, scaler = self.session.window, self.session.scaler
        factor = self.session.mean(targets)
        if isinstance(targets, Tensor) and targets.device.type != "cpu":  # whether it is 0 would have to be waited for
            factor = factor * (targets > 0) if window.weighted else factor
        elif targets == 0:
            if self._sharded:
                self._backward_without_share(loss)
            return
        if not window.weighted and targets is not total:
            factor = factor * (targets / total)
        if self.world > 1 and window.weighted:
            factor = factor * self.world  # the core averages gradients over ranks; the big batch's are their sum
        self.session.loss(loss, targets)
        weighted = loss * factor if isinstance(factor, Tensor) or factor != 1.0 else loss
        (scaler.scale(weighted) if scaler is not None else weighted).backward()

    def _backward_without_share(self, loss: Tensor) -> None:
        """Of a sharded model every rank takes part in every backward, also one whose micro-batch has no targets."""
        if not bool(torch.isfinite(loss)):
            raise AccelError(
                f"backward: weight=0 with a loss of {float(loss)}: the model is sharded, so that its backward has "
                "to run; make it a finite loss, such as its sum"
            )
        scaler, nothing = self.session.scaler, loss * 0.0
        (scaler.scale(nothing) if scaler is not None else nothing).backward()

    def flush(self) -> Outcome | None:
        """See `Accelerated.flush`."""
        if self.world == 1:
            if self.session.window.empty:
                return None
            self._gradients.put_in()
            return self._closed(self.session.close())
        last: Outcome | None = None
        self._gradients.put_in()
        while True:
            if self.session.window.empty:  # takes part with a micro-batch of no targets
                self.session.arrived()
                self.session.mean(0)
            outcome = self._closed(self.session.join())
            if outcome is None:
                self.session.idle()
                return last
            last = outcome

    def _closed(self, outcome: Outcome | None) -> Outcome | None:
        if outcome is not None and outcome.stepped and self.scheduler is not None:
            self.scheduler.step()
        return outcome

    def gradients_inside(self) -> AbstractContextManager[None]:
        """Inside, the parameters hold the gradients of the window that is open: to be saved."""
        return self._gradients.inside()

    def load(self, state: dict[str, Any]) -> None:
        """A saved run's state, its open window included; the random state excepted."""
        self._arrived = None
        self._gradients.drop()
        self.session.load_state_dict(state)
        self._gradients.take_out()
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])


def _parts(loss: Any, weight: float | Tensor) -> Iterator[tuple[Any, float | Tensor]]:
    """(mean loss, targets) of each part, computed when it is asked for."""
    if isinstance(loss, (Tensor, Mapping, str)) or not isinstance(loss, Iterable):
        yield loss, weight
        return
    for part in loss:
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            check_loss(loss)
        yield part


def _mean(found: list[tuple[Tensor, float | Tensor]]) -> Tensor | None:
    """Of losses, each a mean over so many targets; None of none."""
    if len(found) < 2:
        return found[0][0] if found else None
    counted = [(loss, targets) for loss, targets in found if isinstance(targets, Tensor) or targets]
    total = sum(targets for _, targets in counted)
    return sum((loss * (targets / total) for loss, targets in counted), torch.zeros_like(found[0][0]))
