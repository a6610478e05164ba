"""A batch divided along its samples into pieces, which are batches of the same form; nothing is copied.

What holds no samples (a number, a scalar tensor, one row for all) goes into every piece.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

WHOLE = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


class Indivisible(Exception):
    """Why a batch cannot be divided, in a few words."""


def divided(batch: Any, samples: int, limit: int | None) -> list[Any]:
    """Pieces of at most `limit` samples, in their order; the batch itself where it needs no dividing.

    Raises:
        Indivisible: something in it has another number of rows than there are samples, or is of an unknown kind.
    """
    if limit is None or samples <= limit:
        return [batch]
    return [rows(batch, at, min(at + limit, samples), samples) for at in range(0, samples, limit)]


def whole_or_divided(batch: Any, samples: int, limit: int | None) -> list[Any]:
    """As `divided`; a batch that cannot be divided as it is."""
    try:
        return divided(batch, samples, limit)
    except Indivisible:
        return [batch]


def why_whole(batch: Any, samples: int) -> str:
    """Why the batch cannot be divided, or empty."""
    try:
        divided(batch, samples, max(samples // 2, 1))
    except Indivisible as error:
        return str(error)
    return ""


def rows(value: Any, start: int, stop: int, samples: int) -> Any:
    """The samples from `start` to `stop` of a batch of `samples`, as views of it.

    Args:
        value: tensors and arrays [B, ...], and lists of B, in any nesting of mappings, tuples, lists and dataclasses.
        start: the first sample.
        stop: the one after the last.
        samples: B.

    Raises:
        Indivisible: what is neither, see `divided`.
    """

    def part(item: Any) -> Any:
        return rows(item, start, stop, samples)

    if isinstance(value, Tensor):
        if value.dim() == 0 or (value.shape[0] == 1 and samples > 1):
            return value
        if value.shape[0] != samples or value.layout != torch.strided or value.is_nested:
            raise Indivisible(f"a tensor {list(value.shape)} in a batch of {samples}")
        return value[start:stop]
    if isinstance(value, WHOLE):
        return value
    if isinstance(value, Mapping):
        items = {key: part(item) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        same = copy.copy(value)  # a class of its own
        same.update(items)
        return same
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        raise Indivisible("a packed sequence")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(part, value))
    if type(value) in (list, tuple):
        return _of_list(value, start, stop, samples)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        filled = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(filled, field.name, part(getattr(value, field.name)))
        return filled
    shape = getattr(value, "shape", None)  # a NumPy array
    if isinstance(shape, tuple) and hasattr(value, "__array__"):
        if not shape or shape[0] != samples:
            raise Indivisible(f"an array {list(shape)} in a batch of {samples}")
        return value[start:stop]
    raise Indivisible(f"{type(value).__name__} is no tensor")


def _of_list(value: Any, start: int, stop: int, samples: int) -> Any:
    """A list of B things, one a sample; or a few batches side by side, each of B samples."""
    if all(isinstance(item, WHOLE) for item in value):
        return value[start:stop] if len(value) == samples else value
    try:
        return type(value)(rows(item, start, stop, samples) for item in value)
    except Indivisible:
        if len(value) == samples:
            return value[start:stop]
        raise
