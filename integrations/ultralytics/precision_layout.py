"""Precision and memory layout of one live model's forward and loss; what the planner may try and switch.

The host's own autocast surrounds the call. Another precision is an autocast inside of it, so that nothing of the
host's settings (which are saved and resumed) changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from integrations import precision_layout
from integrations.patches import Patches


class Layout(precision_layout.Layout):
    """A trial of one trainer; wraps `model.loss`. `at` names the batch that `loss` runs on."""

    def __init__(self, trainer: Any, model: nn.Module, patches: Patches) -> None:
        super().__init__(model, trainer.device)
        self.trainer, self.patches = trainer, patches
        self.around = patches.around(model, "loss", self._loss)

    def start(self, precision: str, memory_format: str) -> None:
        """Before the first step. The gradient scaler follows the precision; a later switch leaves it as it is."""
        if precision != "host":
            self.trainer.scaler = torch.amp.GradScaler(self.trainer.device.type, enabled=precision == "fp16")
        self.apply(precision, memory_format)

    def store(self, order: torch.memory_format) -> None:
        """Also those of the average."""
        super().store(order)
        if (average := self.trainer.ema) is not None:  # an older host has it on rank 0 only
            average.ema.to(memory_format=order)
            average._pairs = None  # it caches tensors, and these have new storages

    @property
    def host_precision(self) -> str:
        """Of the host's own autocast."""
        if not self.trainer.amp:
            return "fp32"
        return "bf16" if self.trainer.args.amp == "bf16" else "fp16"

    def loss(self) -> Tensor:
        """Forward and loss of a trial, in the autocast that the host's loop would give it."""
        with self.host_autocast():
            value: Tensor = self.model({**self._batch})[0]
            return value

    def host_autocast(self) -> AbstractContextManager[Any]:
        """That of the host's loop around forward and loss."""
        dtype = precision_layout.DTYPES.get(self.host_precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Inside, the model is without patches and criterion, which hold the trainer: to be pickled."""
        model: Any = self.model
        with self.patches.lifted(model):
            criterion, model.criterion = getattr(model, "criterion", None), None
            try:
                yield
            finally:
                model.criterion = criterion

    def _loss(self, inner: Callable[..., Any], batch: dict[str, Any], preds: Any = None) -> Any:
        batch["img"] = self.ordered(batch["img"])
        with self.autocast():
            if preds is None and getattr(self.model, "_compiled_call_impl", None) is not None:
                preds = self.model(batch["img"])  # without a compiled call the forward is the host's own
            return inner(batch) if preds is None else inner(batch, preds)
