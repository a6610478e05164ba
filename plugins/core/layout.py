"""Precision and memory layout of a hand-written loop's forward: what the planner may try and switch.

The two hosts with a trainer of their own have theirs in `integrations`, inside of that trainer's autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plugins.errors import AccelError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layout:
    """A trial of one model, which is left in the layout that `apply` named last. `at` names the loss that it runs."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.precision, self.memory_format = "host", "host"
        self._changed: list[Tensor] = []
        self._loss: Callable[[], Tensor]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of autocast; None where the loop runs in its own."""
        return DTYPES.get(self.precision)

    @torch.no_grad()
    def apply(self, precision: str, memory_format: str) -> None:
        """Values stay as they are, and so do the tensors that an optimizer and an average hold: only the storage order
        of 4-dim ones changes."""
        self.precision = precision
        if memory_format == self.memory_format:
            return
        self.memory_format, wanted = memory_format, torch.contiguous_format
        if memory_format == "channels_last":
            wanted = torch.channels_last
            tensors = (*self.model.parameters(), *self.model.buffers())
            self._changed = [t for t in tensors if t.dim() == 4 and not t.is_contiguous(memory_format=wanted)]
        for tensor in self._changed:
            tensor.data = tensor.data.contiguous(memory_format=wanted)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype is not None else nullcontext()

    def moved(self, value: Tensor) -> Tensor:
        """On the model's device; images [B, C, H, W] in its storage order."""
        value = value.to(self.device, non_blocking=True)
        if self.memory_format == "channels_last" and value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    def at(self, loss: Callable[[], Tensor]) -> Layout:
        self._loss = loss
        return self

    def loss(self) -> Tensor:
        with self.autocast():
            value = self._loss()
        if not isinstance(value, Tensor):
            raise AccelError(f"plan: the loss function returned {type(value).__name__}; it has to return the loss")
        return value

    def bare(self) -> AbstractContextManager[None]:
        return nullcontext()
