"""A module compiled by a backend that counts its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from plugins.core.compile.compiled_module import CompiledModule

X = torch.linspace(-1, 1, 24).reshape(8, 3)


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@contextmanager
def compiled(module: nn.Module, **options: Any) -> Iterator[tuple[CompiledModule, list[str]]]:
    told: list[str] = []
    part = CompiledModule(module, **{"backend": "eager", "give_up": lambda fault: told.append(fault.reason), **options})
    part.install()
    try:
        yield part, told
    finally:
        part.undo()
