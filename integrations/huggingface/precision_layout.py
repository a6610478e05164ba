"""Precision and memory layout of a Trainer's model: what the planner may try and switch.

The host's own autocast lies inside the model's forward. Another precision is an autocast around `compute_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from integrations import precision_layout


class Layout(precision_layout.Layout):
    """Implements the planner's trial on one trainer. `at` names the batch that `loss` runs on."""

    def __init__(self, trainer: Any, model: nn.Module, compute_loss: Any) -> None:
        super().__init__(model, trainer.args.device)
        self.trainer, self.compute_loss = trainer, compute_loss

    @property
    def host_precision(self) -> str:
        """`bf16` or `fp16` as the host's arguments ask; `fp32` without them."""
        args = self.trainer.args
        return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"

    def undo(self) -> None:
        """Go back to the host's own precision and storage order."""
        self.apply("host", "host")

    def loss(self) -> Tensor:
        """Forward and the batch's own mean loss, as the host would run them."""
        inputs = self.laid_out(self.trainer._prepare_inputs(dict(self._batch)))
        with self.trainer.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(self.model, inputs, num_items_in_batch=None)
        return loss

    @contextmanager
    def loss_context(self, original: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """The host's own `compute_loss_context_manager`, and inside it the precision in force."""
        with original(), self.autocast():
            yield

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Inside, the model is without the `generate` and `zero_grad` that were put on it: to be pickled."""
        own = vars(self.model)
        kept: dict[str, Any] = {name: own.pop(name) for name in ("generate", "zero_grad") if name in own}
        try:
            yield
        finally:
            own.update(kept)

    def laid_out(self, inputs: Any) -> Any:
        """Images [B, C, H, W] in the model's own storage order."""
        pixels = inputs.get("pixel_values") if isinstance(inputs, dict) else None
        return {**inputs, "pixel_values": self.ordered(pixels)} if isinstance(pixels, Tensor) else inputs
