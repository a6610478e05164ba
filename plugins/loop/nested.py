"""Tensors in any nesting of dicts, lists, tuples, named tuples and dataclasses: what loaders and models hand around."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def mapped(value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """The same nesting with every tensor changed.

    Args:
        value: anything.
        change: tensor -> tensor.
        other: for what is no container known here (a graph, a string).
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # a named tuple, of which a part has to stay on the CPU
        return other(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, change, other) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        same = copy.copy(value)  # keeps a default factory, and a class of its own
        same.update(items)
        return same
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change, other) for item in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change, other) for item in value)
    if isinstance(value, list):  # a class of its own
        changed = copy.copy(value)
        changed[:] = [mapped(item, change, other) for item in value]
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        filled = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(filled, field.name, mapped(getattr(value, field.name), change, other))
        return filled
    return other(value)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nesting, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note, lambda held: note(held.data) if isinstance(held, PackedSequence) else held)
    return iter(found)


def samples(value: Any) -> int:
    """Of a batch: the first dimension of its first tensor that has one; 0 where there is none."""
    return next((len(tensor) for tensor in tensors(value) if tensor.dim()), 0)
