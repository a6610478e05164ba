"""One update, once a window, in the one order that every host gets:

    unscale -> rescale to exact -> finite? -> clip -> step -> scaler update -> zero gradients -> EMA

A host that steps by itself calls `prepare` before its step and `finish` after it; `step` is both around ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.core.window import ALL, Window, scale_


class Average(Protocol):
    def update(self) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class NonFiniteGradient(RuntimeError):
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
        sync: sum gradients over ranks here, once an update, where the host's own reduction was held back.
        keep_gradients: zero gradients in place, as CUDA graphs need.
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
        keep_gradients: bool = False,
    ) -> None:
        self.optimizer, self.scaler, self.clip_norm, self.nonfinite = optimizer, scaler, clip_norm, nonfinite
        self.average, self.sync, self.keep_gradients = average, sync, keep_gradients
        self._groups = {name: list(params) for name, params in (groups or {}).items()}

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def prepare(self, window: Window, unscale: bool = True) -> Outcome:
        """Unscale, sum over ranks, rescale, check, clip. The only host-device sync of an update is the norm."""
        if unscale and self.scaler is not None and self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if self.sync:
            _add_over_ranks(self.gradients(), mean=not window.weighted)
        self._rescale(window)
        gradients = self.gradients()
        total = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        norm = float(total)
        finite = norm == norm and norm not in (float("inf"), float("-inf"))
        clipped = finite and self.clip_norm is not None and norm > self.clip_norm
        if clipped and self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.clip_norm, total)
        partial = window.micro_batches < window.expected
        outcome = Outcome(finite, norm, clipped, window.micro_batches, window.samples, partial)
        if not finite and self.nonfinite == "stop":
            raise NonFiniteGradient(f"gradient norm is {norm} and nonfinite=stop; weights and EMA are untouched")
        return outcome

    def finish(self, outcome: Outcome) -> None:
        """Move the average, if the update happened."""
        if outcome.stepped and self.average is not None:
            self.average.update()

    def step(self, window: Window) -> Outcome:
        """The whole update. A non-finite gradient leaves weights, optimizer state and average untouched."""
        outcome = self.prepare(window)
        if self.scaler is not None and self.scaler.is_enabled():
            # A finite norm means that the scaler found no inf either; update() lowers the scale where it did.
            if outcome.stepped:
                self.scaler.step(self.optimizer)
            self.scaler.update()
        elif outcome.stepped:
            self.optimizer.step()
        self.zero()
        self.finish(outcome)
        return outcome

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)

    def _rescale(self, window: Window) -> None:
        for group, factor in window.factors().items():
            members = self.parameters() if group == ALL else self._groups[group]
            scale_([p.grad for p in members if p.grad is not None], factor)


def _add_over_ranks(gradients: list[Tensor], mean: bool) -> None:
    """One all-reduce of all gradients: their sum, which the window divides by all ranks' targets; or their mean."""
    if not gradients or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    if mean:
        flat /= dist.get_world_size()
    torch._foreach_copy_(gradients, list(torch._utils._unflatten_dense_tensors(flat, gradients)))
