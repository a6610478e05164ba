"""Where memory runs out in a hand-written loop: pieces of a batch, each with its own targets, or one line of advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from integrations.shared.pieces import Indivisible, divided
from plugins.core.step.rescue import TOLD, OutOfMemory
from plugins.core.system import memory
from plugins.loop import nested

Weight = float | Tensor
UNKNOWN = "weight is a number of another count than its samples; give weight as a function of the batch"


def weighed(batch: Any, weight: Weight | Callable[[Any], Weight] | None, limit: int | None) -> list[tuple[Any, Weight]]:
    """(piece, weight) of each piece of at most `limit` samples.

    Args:
        batch: any nesting of tensors.
        weight: as `Accelerated.training_step` takes it.
        limit: None leaves the batch whole.

    Raises:
        Indivisible: the batch cannot be divided, or its weight cannot.
    """
    samples = nested.samples(batch)
    pieces = divided(batch, samples, limit)
    return [(piece, _of(weight, batch, piece, samples, whole=len(pieces) == 1)) for piece in pieces]


def whole_or_weighed(
    batch: Any, weight: Weight | Callable[[Any], Weight] | None, limit: int | None
) -> list[tuple[Any, Weight]]:
    """As `weighed`; a batch that cannot be divided as it is."""
    try:
        return weighed(batch, weight, limit)
    except Indivisible:
        return weighed(batch, weight, None)


def why_whole(batch: Any, weight: Weight | Callable[[Any], Weight] | None) -> str:
    """Why the batch cannot be divided, or empty."""
    try:
        weighed(batch, weight, max(nested.samples(batch) // 2, 1))
    except Indivisible as error:
        return str(error)
    return ""


def raise_short(error: BaseException, samples: int, update: int) -> None:
    """Raise what the loop's own forward or backward met as one line, if it is a lack of memory; else do nothing.

    Raises:
        OutOfMemory: it is.
    """
    if isinstance(error, TOLD) or not memory.is_out_of_memory(error):
        return
    memory.let_go(error)
    raise OutOfMemory(
        f"out of memory at update {update} with a micro-batch of {samples}: use accel.training_step(loss_fn, batch), "
        "which divides it and goes on, or a smaller batch with accumulate as much larger"
    ) from None


def _of(weight: Weight | Callable[[Any], Weight] | None, batch: Any, piece: Any, samples: int, whole: bool) -> Weight:
    """The targets of a piece.

    A number is divided where it is the samples, or the elements of a tensor of the batch (pixels): as these are.
    """
    if weight is None:
        return nested.samples(piece)
    if callable(weight) and not isinstance(weight, Tensor):
        return weight(piece)
    if whole:
        return weight
    if float(weight) == samples:
        return nested.samples(piece)
    for all_of_it, some in zip(nested.tensors(batch), nested.tensors(piece), strict=True):
        if all_of_it.numel() == float(weight):
            return some.numel()
    raise Indivisible(UNKNOWN)
