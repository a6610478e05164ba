"""Memory that runs out: a layer that refuses more than so many samples, from a given update on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOLD = "CUDA out of memory. Tried to allocate 20.00 MiB"


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError(TOLD)


class Short(nn.Module):
    """Hands its input on.

    Attributes:
        most: samples that fit; None: any.
        after: calls with a gradient before memory gets short.
        backward: fail there, with half of the gradients summed up already; else in the forward.
        failed: how often it did.
    """

    def __init__(self, most: int | None = None, after: int = 0, backward: bool = False, error=torch.OutOfMemoryError):
        super().__init__()
        self.most, self.after, self.backward, self.error = most, after, backward, error
        self.calls = self.failed = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        self.calls += 1
        if self.most is None or self.calls <= self.after or len(x) <= self.most:
            return x
        self.failed += 1
        if self.backward:
            return _Fails.apply(x)
        raise self.error(TOLD)
