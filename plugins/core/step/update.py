"""One update, once a window, in the one order that every host gets. This is the place where that order stands.

Before it, for every micro-batch: forward inside autocast, through the compiled callable (which was compiled outside
autocast) -> loss x weight -> backward outside autocast. When the window closes, `run_update` reads:

    schedule's rate -> mean over ranks -> unscale -> rescale to exact -> finite? -> clip
    -> step -> scaler update -> zero gradients -> EMA

Parameters that are sharded over ranks (`core.system.sharding`) have had their mean in the backward. Factors work on
each rank's shards, and the norm is one number over all of them, so that ranks clip and skip alike.

A host that steps by itself calls the halves around its own step: `prepare_update` is the first line of these two, and
`finish_update` the average at the end of the second. An engine that does all but the average inside of a backward tells
by `engine_stepped` what it came to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.core.step.accumulation import ALL, Window, over_ranks, scale_
from plugins.core.system.devices import collective_device
from plugins.core.system.sharding import is_sharded, reshard, total_norm
from plugins.errors import AccelError


class Average(Protocol):
    """What follows the weights, such as an EMA."""

    def update(self) -> None:
        """Take in the weights that an update has just left."""


class NonFiniteGradient(AccelError, RuntimeError):
    """Raised at `nonfinite=stop`."""


@dataclass
class Outcome:
    """What one window came to. `norm` is the L2 norm of the exact gradient before clipping."""

    stepped: bool
    norm: float
    clipped: bool
    micro_batches: int
    samples: int
    partial: bool


class Update:
    """Owns the order of an update for one optimizer.

    Args:
        optimizer: the host's own.
        scaler: a `torch.amp.GradScaler`, or None.
        clip_norm: L2 norm, or None to leave gradients untouched.
        nonfinite: `skip`, or `stop` to raise `NonFiniteGradient`.
        groups: parameters by loss group, where a host has several normalisers; default all in one.
        average: moved after every update that happened, never after a skipped one.
        sync: average gradients over ranks here, once an update, where the host's own reduction was held back. Hosts
            multiply the loss by the number of ranks, so that the average is the sum that a big batch has.
        keep_gradients: whether to zero gradients in place now, as CUDA graphs need.
        schedule: sets the rates of the update that comes.
        order: the model's parameters; hosts sum the norm in this order, and its last bit depends on it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: Any = None,
        clip_norm: float | None = None,
        nonfinite: str = "skip",
        groups: Mapping[str, Iterable[nn.Parameter]] | None = None,
        average: Average | None = None,
        sync: bool = False,
        keep_gradients: Callable[[], bool] = lambda: False,
        schedule: Callable[[], None] = lambda: None,
        order: Iterable[nn.Parameter] = (),
    ) -> None:
        self.optimizer, self.scaler, self.clip_norm, self.nonfinite = optimizer, scaler, clip_norm, nonfinite
        self.average, self.sync, self.keep_gradients = average, sync, keep_gradients
        self._set_rates = schedule
        # A list stays the host's own, who may put other parameters into it between two updates.
        self._groups = {n: params if isinstance(params, list) else list(params) for n, params in (groups or {}).items()}
        self._order = {id(p): at for at, p in enumerate(order)}

    def parameters(self) -> list[nn.Parameter]:
        """All that the optimizer holds, in the model's order where it is known."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        return sorted(found, key=lambda p: self._order.get(id(p), len(self._order)))

    def beside(self, model: nn.Module) -> list[nn.Parameter]:
        """What the optimizer holds and the model does not (a criterion's weights), in the order of its groups."""
        reshard(model)  # while it is gathered, a model gives other tensors than the optimizer holds
        own = {id(p) for p in model.parameters()}
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in own]

    def gradients(self) -> list[Tensor]:
        """Those of `parameters` that have one, in the same order."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    # -- the order -------------------------------------------------------------------------------------------------

    def run_update(self, window: Window) -> Outcome | None:
        """The whole update; None where no rank has a micro-batch for it.

        A gradient that is not finite leaves weights, optimizer state and average untouched.

        Raises:
            NonFiniteGradient: such a gradient, at `nonfinite=stop`.
        """
        outcome = self.prepare_update(window)
        if outcome is not None:
            self._step(outcome.stepped)
        self.zero_gradients()
        if outcome is not None:
            self.finish_update(outcome)
        return outcome

    def prepare_update(self, window: Window) -> Outcome | None:
        """Everything up to the step. Its only wait for the device is the norm."""
        self._set_rates()
        self._leave_out_frozen()
        # Before unscaling, so that an inf of one rank lowers the scale of all.
        if self.sync and not average_over_ranks(self.parameters(), not window.empty):
            return None
        self._unscale()
        self._rescale(window)
        norm = self._norm()
        outcome = self._checked(window, float(norm))
        if outcome.clipped and self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.clip_norm, norm)
        return outcome

    def engine_stepped(self, window: Window, norm: float, stepped: bool) -> Outcome:
        """For an engine that has reduced, checked, clipped and stepped by itself: what it came to.

        Raises:
            NonFiniteGradient: it has skipped the update, at `nonfinite=stop`.
        """
        if not stepped:
            self._refuse(norm)
        clipped = stepped and self.clip_norm is not None and norm > self.clip_norm
        return self._outcome(window, stepped, norm, clipped)

    def finish_update(self, outcome: Outcome) -> None:
        """After the step: the average moves, if the update happened."""
        if outcome.stepped and self.average is not None:
            self.average.update()

    # -- its steps -------------------------------------------------------------------------------------------------

    def _leave_out_frozen(self) -> None:
        """A parameter that was frozen inside the window gets no update from what came before."""
        for parameter in self.parameters():
            if parameter.grad is not None and not parameter.requires_grad and not self.keep_gradients():
                parameter.grad = None

    def _unscale(self) -> None:
        if self._scaled:
            self.scaler.unscale_(self.optimizer)

    def _rescale(self, window: Window) -> None:
        """To the big batch's gradient, now that the window's totals are known."""
        for group, factor in window.factors().items():
            members = self.parameters() if group == ALL else self._groups[group]
            scale_([p.grad for p in members if p.grad is not None], factor)

    def _norm(self) -> Tensor:
        return total_norm(self.gradients())

    def _checked(self, window: Window, norm: float) -> Outcome:
        finite = math.isfinite(norm)
        if not finite:
            self._refuse(norm)
        clipped = finite and self.clip_norm is not None and norm > self.clip_norm
        return self._outcome(window, finite, norm, clipped)

    def _refuse(self, norm: float) -> None:
        if self.nonfinite == "stop":
            raise NonFiniteGradient(f"gradient norm is {norm} and nonfinite=stop; weights and EMA are untouched")

    def _outcome(self, window: Window, stepped: bool, norm: float, clipped: bool) -> Outcome:
        partial = window.micro_batches < window.expected
        return Outcome(stepped, norm, clipped, window.micro_batches, window.samples, partial)

    def _step(self, finite: bool) -> None:
        """A finite norm means that the scaler found no inf either; its `update` lowers the scale where it did."""
        if self._scaled:
            if finite:
                self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()

    def zero_gradients(self) -> None:
        """In place where they have to stay; otherwise as hosts do, since a user's optimizer may take no argument."""
        if self.keep_gradients():
            self.optimizer.zero_grad(set_to_none=False)
        else:
            self.optimizer.zero_grad()

    @property
    def _scaled(self) -> bool:
        """A scaler that meets no gradient at all has checked nothing, and refuses to step."""
        return self.scaler is not None and self.scaler.is_enabled() and bool(self.gradients())


def average_over_ranks(parameters: list[nn.Parameter], takes_part: bool = True) -> bool:
    """One all-reduce of all gradients: the mean over ranks, as DistributedDataParallel would give.

    A parameter that a rank did not reach in its window adds zeros there; one that no rank reached keeps no gradient.
    Gradients of sharded parameters are means already.

    Args:
        parameters: the same on every rank.
        takes_part: whether this rank has a micro-batch; one that has run out of them adds zeros to the others'.

    Returns:
        Whether any rank takes part.

    Raises:
        AccelError: another rank has left the run, or a gradient is sparse.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return takes_part
    trainable = [p for p in parameters if p.requires_grad and not is_sharded(p)]
    if any(p.grad is not None and p.grad.is_sparse for p in trainable):
        raise AccelError("a sparse gradient (Embedding with sparse=True): not over several ranks; use sparse=False")
    reached = torch.tensor([*(p.grad is not None for p in trainable), takes_part])
    pieces = [_real(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trainable]
    flat = torch.cat([*pieces, reached.to(pieces[0] if pieces else torch.zeros((), device=collective_device()))])
    over_ranks(flat)
    *means, ranks = (flat / dist.get_world_size()).split([*(p.numel() for p in pieces), len(reached)])
    anywhere = reached.tolist() if bool(reached.all()) else (ranks > 0).tolist()
    for parameter, mean, found in zip(trainable, means, anywhere, strict=False):
        if found:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            real = _real(parameter.grad)
            real.copy_(mean.view_as(real))
    return bool(anywhere[-1])


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as the pairs of numbers that it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
