"""Where autocast stands in Lightning, and how a trial runs a module's `training_step` without being seen."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from integrations import precision_layout
from integrations.patches import Patches


class Layout(precision_layout.Layout):
    """`at` is given (batch, index) of a `training_step`."""

    def __init__(self, trainer: Any, module: nn.Module, patches: Patches) -> None:
        super().__init__(module, trainer.strategy.root_device)
        self.trainer = trainer
        self._context = patches.put(trainer.precision_plugin, "train_step_context", self._train_step_context)

    @property
    def host_precision(self) -> str:
        """As the trainer's `precision` names it: `bf16`, `fp16`, or `fp32` for any other."""
        name = str(self.trainer.precision).lower()
        return "bf16" if "bf16" in name else "fp16" if "16" in name else "fp32"

    @contextmanager
    def _train_step_context(self) -> Iterator[None]:
        with self._context(), self.autocast():
            yield

    def loss(self) -> Tensor:
        """Forward and loss of the batch at hand, on a copy of which the module and the trainer see nothing."""
        batch, index = self._batch
        with self._train_step_context():
            output = _unseen(self.model, self.trainer).training_step(batch, index)
        return output["loss"] if isinstance(output, dict) else output


def _unseen(module: Any, trainer: Any) -> Any:
    """A copy with the module's own weights and compiled code: what it logs, counts or keeps stays with it."""
    shared = {id(held): held for held in (trainer, *module.parameters())}
    twin = copy.deepcopy(module, shared)
    for live, copied in zip(module.modules(), twin.modules(), strict=True):
        if (compiled := vars(live).get("_compiled_call_impl")) is not None:
            vars(copied)["_compiled_call_impl"] = compiled
    for name in ("log", "log_dict", "print"):
        vars(twin)[name] = lambda *args, **kwargs: None
    return twin
