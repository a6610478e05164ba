"""Precision and memory layout of one model's forward: what the planner may try and switch, in any loop.

Each host's own `Layout` adds its forward, and says where its autocast stands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layout:
    """A trial of one model (see `contract.Session.plan_window`), left in the layout that `apply` named last."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.precision, self.memory_format = "host", "host"
        self._batch: Any = None

    @property
    def host_precision(self) -> str:
        """Of the host's own autocast; fp32 without one."""
        return "fp32"

    def apply(self, precision: str, memory_format: str) -> None:
        """Switch from here on. Values stay as they are; only the storage order of 4-dim tensors changes."""
        self.precision = precision
        if memory_format != self.memory_format:
            self.memory_format = memory_format
            self.store(torch.channels_last if memory_format == "channels_last" else torch.contiguous_format)

    def store(self, order: torch.memory_format) -> None:
        """Keep the weights in this memory order."""
        self.model.to(memory_format=order)  # type: ignore[call-overload]

    def at(self, batch: Any) -> Any:
        """Names what `loss` runs on."""
        self._batch = batch
        return self

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast in force; nothing where the host's own precision stands."""
        if self.precision == "host":
            return nullcontext()
        dtype = DTYPES.get(self.precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def ordered(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in the model's storage order; other tensors as they are."""
        if self.memory_format == "channels_last" and images.dim() == 4:
            return images.contiguous(memory_format=torch.channels_last)
        return images

    def bare(self) -> AbstractContextManager[None]:
        """Inside, the model is without what was put on it: to be pickled."""
        return nullcontext()


class LoopLayout(Layout):
    """Of a hand-written loop: `at` is given forward and loss as a function of nothing."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self._changed: list[Tensor] = []

    @property
    def dtype(self) -> torch.dtype | None:
        """Of autocast; None where the loop runs in its own."""
        return DTYPES.get(self.precision)

    @torch.no_grad()
    def store(self, order: torch.memory_format) -> None:
        """In place, in the tensors that an optimizer and an average hold; what its owner laid out stays so.

        Strides count, not the order of the bytes: a first convolution of one channel (grey pictures) is the same in
        both, and unless its strides say NHWC, all until the next convolution runs in NCHW, several times slower.
        """
        if order == torch.channels_last:
            tensors = (*self.model.parameters(), *self.model.buffers())
            self._changed = [t for t in tensors if t.dim() == 4 and t.to(memory_format=order).stride() != t.stride()]
        for tensor in self._changed:
            tensor.data = tensor.data.to(memory_format=order)

    def moved(self, value: Tensor) -> Tensor:
        """On the model's device; images [B, C, H, W] in its storage order."""
        return self.ordered(value.to(self.device, non_blocking=True))

    def loss(self) -> Tensor:
        """Forward and loss of the batch at hand, in the autocast in force."""
        loss: Callable[[], Tensor] = self._batch
        with self.autocast():
            return loss()
