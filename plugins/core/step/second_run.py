"""A second run of a forward that reads what the first one read, and leaves no trace.

Weights and inputs apart, a forward may read and move buffers (BatchNorm's statistics, counters, codebooks), attributes
of its modules, and random generators. torch's own checkpoint keeps torch's generators and autocast; the rest is kept
here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

NUMBERS = (bool, int, float, complex, str, type(None))
HOLDING = (list, dict, set)
OF_TORCH = frozenset(vars(nn.Module()))


class FirstRun:
    """What the forward of `modules` can read as it begins.

    Args:
        modules: all whose forward runs: a block with the modules in it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._numbers = [(vars(m), {n: v for n, v in vars(m).items() if type(v) in NUMBERS}) for m in modules]
        self._buffers = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
        read = (m for m in modules if m._buffers and not _only_writes(m))
        self._values = [(b, b.detach().clone()) for m in read for b in m._buffers.values() if b is not None]
        self._random = _random_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as the first run found it; afterwards, as it was before."""
        attributes = [(vars(m), dict(vars(m))) for m in self.modules]
        insides = [(v, copy(v)) for _, found in attributes for n, v in found.items() if _may_change(n, v)]
        buffers = [(live, dict(live)) for live, _ in self._buffers]
        values = [(b, b.detach().clone()) for _, found in buffers for b in found.values() if b is not None]
        state = _random_state()
        for own, numbers in self._numbers:
            own.update(numbers)
        _put(self._buffers)
        _fill(self._values)
        self._random()
        try:
            yield
        finally:
            state()
            _put(buffers)
            _fill(values)
            _put(attributes)
            for value, inside in insides:
                value.clear()
                value.extend(inside) if isinstance(value, list) else value.update(inside)


def _only_writes(module: nn.Module) -> bool:
    """A BatchNorm in training normalises by the batch, whatever its statistics are."""
    return isinstance(module, _BatchNorm) and module.training


def _may_change(name: str, value: Any) -> bool:
    return type(value) in HOLDING and name not in OF_TORCH


def _put(kept: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for live, found in kept:
        for name in live.keys() - found.keys():
            del live[name]
        live.update(found)


def _fill(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """By `data`: a buffer that a backward still needs keeps its version."""
    with torch.no_grad():
        for buffer, value in values:
            buffer.data.copy_(value)


def _random_state() -> Callable[[], None]:
    """Puts Python's and NumPy's generators back as they are now."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None

    def put_back() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)

    return put_back
