"""Precision and memory layout of a Trainer's model: what the planner may try and switch.

The host's own autocast lies inside the model's forward. Another precision is an autocast around `compute_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layout:
    """Implements the planner's trial on one trainer. `at` names the batch that `loss` runs on."""

    def __init__(self, trainer: Any, model: nn.Module, compute_loss: Any) -> None:
        self.trainer, self.model, self.compute_loss = trainer, model, compute_loss
        self.precision, self.memory_format = "host", "host"
        self._inputs: Any = {}

    def apply(self, precision: str, memory_format: str) -> None:
        """Switch from here on. Values stay as they are; only the storage order of 4-dim weights changes."""
        self.precision = precision
        if memory_format != self.memory_format:
            channels_last = memory_format == "channels_last"
            self.model.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)  # type: ignore[call-overload]
            self.memory_format = memory_format

    def undo(self) -> None:
        self.apply("host", "host")

    def at(self, inputs: Any) -> Layout:
        self._inputs = inputs
        return self

    def loss(self) -> Tensor:
        """Forward and the batch's own mean loss, as the host would run them."""
        inputs = self.laid_out(self.trainer._prepare_inputs(dict(self._inputs)))
        with self.trainer.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(self.model, inputs, num_items_in_batch=None)
        return loss

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Inside, the model is without what was put on the instance: to be pickled."""
        own = vars(self.model)
        kept: dict[str, Any] = {name: own.pop(name) for name in ("generate", "zero_grad") if name in own}
        try:
            yield
        finally:
            own.update(kept)

    def laid_out(self, inputs: Any) -> Any:
        """Images [B, C, H, W] in the model's own storage order."""
        pixels = inputs.get("pixel_values") if isinstance(inputs, dict) else None
        if self.memory_format == "channels_last" and isinstance(pixels, Tensor) and pixels.dim() == 4:
            return {**inputs, "pixel_values": pixels.contiguous(memory_format=torch.channels_last)}
        return inputs

    def context(self) -> AbstractContextManager[Any]:
        """The autocast in force around the loss; nothing where the host's precision stands."""
        if self.precision == "host":
            return nullcontext()
        device = self.trainer.args.device.type
        if self.precision == "fp32":
            return torch.autocast(device, enabled=False)
        return torch.autocast(device, dtype=DTYPES[self.precision])
