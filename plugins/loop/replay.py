"""The model's own calls in one micro-batch, to be made again for timing: the user's loss runs once, and never again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plugins.loop.nested import mapped, tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Replay:
    """Notes how a loss calls the model, and calls it in the same way.

    Args:
        model: the bare module.
        place: puts a tensor where, and as, the model takes it now.
    """

    def __init__(self, model: nn.Module, place: Callable[[Any], Any]) -> None:
        self.model, self.place = model, place
        self.calls: list[Call] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, calls of the model that have a gradient are noted, in place of those of the micro-batch before."""
        noted: list[Call] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                noted.append((mapped(args, _leaf), mapped(kwargs, _leaf)))
            return (there or self.model._call_impl)(*args, **kwargs)

        there = vars(self.model).get("_compiled_call_impl")
        self.model._compiled_call_impl = call  # type: ignore[assignment]
        try:
            yield
        finally:
            del self.model._compiled_call_impl
            if there is not None:
                self.model._compiled_call_impl = there
        self.calls = noted

    def loss(self) -> Tensor:
        """A number whose backward goes through all that the model returned: the mean square of each tensor, summed."""
        total = torch.zeros(())
        for args, kwargs in self.calls:
            found = tensors(self.model(*self.place(args), **self.place(kwargs)))
            for out in found:
                if out.requires_grad:
                    total = total.to(out.device) + (out.abs() if out.is_complex() else out).float().square().mean()
        return total

    def forget(self) -> None:
        """Let the noted inputs go."""
        self.calls = []


def _leaf(value: Tensor) -> Tensor:
    """The same values without the graph that they came from."""
    return value.detach().requires_grad_(value.requires_grad)
