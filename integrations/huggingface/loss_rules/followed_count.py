"""Following the count that the host passes to a loss: whether it is used, and what is divided by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Trace:
    """What became of the host's count in one call."""

    used: bool = False
    quotients: list[Tensor] = field(default_factory=list)


class Followed(Tensor):
    """The host's count, as a tensor that notes the quotients it is the divisor of, and that it was used at all."""

    traced: Trace

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        found = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), None)
        result = func(*plain(list(args)), **plain(kwargs or {}))
        trace = getattr(found, "traced", None)
        if trace is None or name == "__get__":
            return result
        trace.used = True
        if name in {"to", "clamp", "clamp_min", "maximum", "max", "float", "double", "detach", "clone", "type_as"}:
            return follow(result, trace) if isinstance(result, Tensor) and result.dim() == 0 else result
        if "div" in name and isinstance(result, Tensor):
            trace.quotients.append(result.detach().sum())  # a new tensor: a later change in place is not in it
        return result


def follow(number: Any, trace: Trace) -> Any:
    """The number in a form whose use is written to `trace`; what is no single tensor comes back as it is."""
    if not isinstance(number, Tensor) or number.dim():
        return number
    followed: Any = number.as_subclass(Followed)
    followed.traced = trace
    return followed


def plain(values: Any) -> Any:
    """Arguments with plain tensors in place of followed ones."""
    if isinstance(values, dict):
        return {name: bare(value) for name, value in values.items()}
    return [bare(value) for value in values]


def bare(value: Any) -> Any:
    """A followed tensor as the plain one that it is; anything else as it is."""
    if not isinstance(value, Followed):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)
