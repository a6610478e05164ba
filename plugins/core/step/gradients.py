"""The gradients of one window, kept apart from what other backward calls leave in the same parameters.

A plain loop calls `zero_grad`, `backward`, `step`: its update holds the gradients of its own loss and no others. In a
GAN the generator's backward leaves gradients in the discriminator, also between two micro-batches of one window. So
before a window's backward everything that is there is dropped, and what the window has summed so far is put in; after
it, if the window goes on, that is taken out again. Only references move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WindowGradients:
    """Of one optimizer.

    Attributes:
        inside_parameters: whether the parameters hold them now.

    Args:
        parameters: all that the optimizer holds now.
        keep: whether gradients have to stay where they are, as CUDA graphs need. They are then zeroed in place at a
            window's start; what comes from elsewhere between its micro-batches cannot be told from its own.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], keep: Callable[[], bool]) -> None:
        self._parameters, self._keep = parameters, keep
        self._held: dict[nn.Parameter, Tensor] = {}
        self.inside_parameters = False

    def clear(self) -> bool:
        """Drop what lies in the parameters; returns whether there was anything. Nothing where gradients stay."""
        if self._keep():
            return False
        found = [p for p in self._parameters() if p.grad is not None]
        for parameter in found:
            parameter.grad = None
        return bool(found)

    def put_in(self, first: bool = False) -> bool:
        """Before a backward, the window's `first` or a later one: the parameters hold the window's gradients alone.

        Returns whether others had to be dropped.
        """
        dropped = self.clear()
        if first and self._keep():
            gradients = [p.grad for p in self._parameters() if p.grad is not None]
            if gradients:
                torch._foreach_zero_(gradients)
        for parameter, gradient in self._held.items():
            parameter.grad = gradient
        self._held, self.inside_parameters = {}, True
        return dropped

    def take_out(self) -> None:
        """After a backward, if the window goes on."""
        self.inside_parameters = False
        if not self._keep():
            self._held = {p: p.grad for p in self._parameters() if p.grad is not None}
            self.clear()

    def drop(self) -> None:
        """Forget the window."""
        self._held, self.inside_parameters = {}, False
        self.clear()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the parameters hold the window's gradients: to be saved."""
        self.put_in()
        try:
            yield
        finally:
            self.take_out()
