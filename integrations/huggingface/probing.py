"""Measuring how an unknown loss adds up, on one batch, before the first window.

A user's `compute_loss` or `compute_loss_func` may use the count that the host hands it, ignore it, or weigh its
terms in its own way. Two facts can be measured: whether parts of a batch add up when the count is held
(then the host's own way is exact), and whether their means, weighted by a counting rule, give the whole's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from integrations.huggingface.counting import SUM, Counting, candidates, samples

TOLERANCE = 1e-4
"""Relative; a loss of fp32 sums differs by less, a wrong rule by far more."""

HOST = "host"
"""The loss normalises by the count that the host passes: the host's way is exact."""

LATER = "later"
"""The loss of this batch is not finite: another batch has to tell."""


def probe(loss: Callable[[dict[str, Any], Any], Tensor], batch: Mapping[str, Any], model: Any) -> Counting | str | None:
    """How `loss(inputs, num_items)` adds up: HOST, a counting rule, LATER, or None where nothing fits.

    Runs forwards without gradients, in evaluation mode, and leaves the random state as it was.
    `num_items` is a 0-dim tensor, or None to ask for the batch's own mean.
    """
    size = samples(batch)
    if size < 2:
        return None
    first, rest = take_rows(batch, 0, 1), take_rows(batch, 1, size)
    with _quietly(model), torch.no_grad():
        for held in (True, False):
            number = torch.tensor(float(size)) if held else None
            try:
                whole, one, other = (float(loss(dict(part), number)) for part in (batch, first, rest))
                if held and _same(one + other, whole) and not _same(whole, float(loss(dict(batch), number * 2))):  # type: ignore[operator]
                    return HOST
            except Exception:
                continue  # a loss that cannot be asked in this way is not of this kind
            if not math.isfinite(whole):
                return LATER
            if held:
                continue
            for rule in candidates(batch):
                a, b = rule.count(first), rule.count(rest)
                if a is None or b is None or a + b == 0:
                    continue
                if _same(one + other if rule.kind == SUM else (a * one + b * other) / (a + b), whole):
                    return rule
    return None


def take_rows(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The rows [start, stop) of every tensor that has the batch's size in dim 0."""
    size = samples(batch)
    return {
        name: value[start:stop] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value
        for name, value in batch.items()
    }


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-12)


@contextmanager
def _quietly(model: Any) -> Any:
    training = model.training
    model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.train(training)
