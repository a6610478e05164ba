"""The micro-batches of a hand-written loop: what is counted, whose gradients a window holds, and when it closes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from integrations.contract import Outcome, Session
from plugins.core.step.gradients import WindowGradients
from plugins.errors import AccelError

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

    def arrive(self, samples: int) -> None:
        """A forward begins; the first since the last backward is the micro-batch's."""
        if self._arrived is None:
            self._gradients.clear()
            self.session.arrived()
            self._arrived = samples

    def leave_out(self) -> None:
        """The micro-batch gets no backward."""
        self._arrived = None

    def backward(self, loss: Tensor | Iterable[tuple[Tensor, float]], weight: float | Tensor) -> Outcome | None:
        """See `Accelerated.backward`."""
        if self._arrived is None:
            self.arrive(int(weight))
        samples, self._arrived = self._arrived or 0, None
        if self._gradients.put_in(first=self.session.window.empty):
            self.session.warn(FOREIGN)
        if not self.session.report.window.micro_batch:
            self.session.describe_window(samples)
        try:
            self.session.count(samples)
            self._weighted_backward(loss, weight)
        except BaseException:
            self.session.drop()
            self._gradients.drop()
            raise
        outcome = self._closed(self.session.backward_done())
        if outcome is None:
            self._gradients.take_out()
        self.session.idle()
        return outcome

    def _weighted_backward(self, loss: Tensor | Iterable[tuple[Tensor, float]], weight: float | Tensor) -> None:
        factor = self.session.mean(weight)
        window, scaler = self.session.window, self.session.scaler
        if isinstance(weight, Tensor) and weight.device.type != "cpu":  # whether it is 0 would have to be waited for
            factor = factor * (weight > 0) if window.weighted else factor
        elif weight == 0:
            if self._sharded:
                self._backward_without_share(loss)
            return
        if self.world > 1 and window.weighted:
            factor = factor * self.world  # the core averages gradients over ranks; the big batch's are their sum
        for part, targets in [(loss, weight)] if isinstance(loss, Tensor) else loss:
            share = factor if targets is weight else factor * (targets / weight)
            weighted = part * share if isinstance(share, Tensor) or share != 1.0 else part
            (scaler.scale(weighted) if scaler is not None else weighted).backward()

    def _backward_without_share(self, loss: Tensor | Iterable[tuple[Tensor, float]]) -> None:
        """Of a sharded model every rank takes part in every backward, also one whose micro-batch has no targets."""
        scaler = self.session.scaler
        for part, _ in [(loss, 0.0)] if isinstance(loss, Tensor) else loss:
            if not bool(torch.isfinite(part)):
                raise AccelError(
                    f"backward: weight=0 with a loss of {float(part)}: the model is sharded, so that its backward has "
                    "to run; make it a finite loss, such as its sum"
                )
            nothing = part * 0.0
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
