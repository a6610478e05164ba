"""What the calls of a user's loss have shown so far: which rules can still be true, on every rank the same."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from integrations.huggingface.gradient_scaling import NEAR
from integrations.huggingface.loss_rules.observation import RULES, Rule, Seen, Way, errors

TRIES = 16
"""Calls that are read to learn what of the model stays the same in a run; each makes the host wait for the device."""


class Evidence:
    """The rules that every call so far fits.

    Args:
        tolerance: relative; what rounding may change of a loss.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.possible: list[Rule] = list(RULES)
        self.calls = 0  # that told something
        self._count_is_left: bool | None = None  # by the model, as far as a call has told
        self._tries = TRIES  # left, to tell that
        self._multiplied: float | None = None  # as far as a call has told
        self._pending: list[tuple[Tensor, dict[Rule, Tensor]]] = []

    def note(self, loss: Tensor, seen: Seen, micro_batches: int, ranks: int) -> None:
        """One call; looked at in `settle`, so that a device is waited for once a window."""
        found = errors(loss, seen, self.possible, micro_batches, ranks)
        self._pending.append((torch.isfinite(loss.detach()).all(), found))

    def settle(self) -> None:
        """Drop the rules that a call noted since does not fit. A loss that is not finite tells nothing."""
        pending, self._pending = self._pending, []
        for finite, found in pending:
            if not finite:
                continue
            self.calls += 1
            apart = torch.stack(list(found.values())).tolist() if found else []
            fits = {rule for rule, error in zip(found, apart, strict=True) if error <= self.tolerance}
            self.possible = [rule for rule in self.possible if rule in fits]

    def uses_count(self, seen: Seen) -> bool:
        """Whether the host's count may be in this loss: many heads get it and leave it aside, as BERT's do."""
        if seen.passed and not seen.trace.used and self._count_is_left is None and self._tries:
            self._tries -= 1
            self._count_is_left = self._leaves_count(seen.passed[0])
        return seen.trace.used or (bool(seen.passed) and self._count_is_left is not True)

    def multiplied(self, seen: Seen) -> float:
        """By what the host has multiplied the loss of the model that a user's method got from it: the ranks, or 1."""
        told = [call.loss / call.own for call in seen.passed if call.own is not None and call.loss is not None]
        if not told:
            return 1.0
        if self._multiplied is None and math.isfinite(by := float(told[0])):
            self._multiplied = float(ranks() if abs(by - ranks()) < NEAR else 1)
        return self._multiplied or 1.0

    def _leaves_count(self, call: Seen) -> bool | None:
        """Of a call of the model: whether its own loss is a mean of its own terms; None where both would be alike."""
        if call.own is None or not bool(torch.isfinite(call.own)):
            return None
        found = errors(call.own, call, list(RULES), 1, ranks())
        fits = {rule.way for rule, error in found.items() if float(error) <= self.tolerance}
        return None if fits >= {Way.MEAN, Way.COUNTED} else Way.MEAN in fits

    def agree(self, device: torch.device) -> None:
        """A rule holds where it holds on every rank. A collective over all of them."""
        if ranks() == 1:
            return
        told = torch.tensor([float(rule in self.possible) for rule in RULES] + [0.0], device=device)
        told[-1] = -float(self.calls)
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
        self.possible = [rule for rule, holds in zip(RULES, told.tolist()[:-1], strict=True) if holds]
        self.calls = int(-told[-1])

    def rule(self, totals: Mapping[str, float]) -> Rule | None:
        """The likeliest rule whose terms can be counted in this window; None where nothing fits."""
        return next((rule for rule in self.possible if totals.get(rule.kind, 1.0) > 0), None)


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(value: Tensor | float, device: torch.device) -> Tensor | float:
    """The sum of this number over all ranks; a 0-dim tensor where they meet on a device, which nothing waits for."""
    if ranks() == 1:
        return value
    total = torch.as_tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) if device.type == "cpu" else total


def over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The sums of these numbers over all ranks; NaN where a rank has none."""
    if ranks() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()  # type: ignore[no-any-return]
