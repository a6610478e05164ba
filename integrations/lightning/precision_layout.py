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
        name = str(self.trainer.precision).lower()
        return "bf16" if "bf16" in name else "fp16" if "16" in name else "fp32"

    @contextmanager
    def _train_step_context(self) -> Iterator[None]:
        with self._context(), self.autocast():
            yield

    def loss(self) -> Tensor:
        batch, index = self._batch
        with self._train_step_context():
            output = _unseen(self.model).training_step(batch, index)
        return output["loss"] if isinstance(output, dict) else output


def _unseen(module: Any) -> Any:
    """A stand-in that shares the module's weights; what it logs, sets or counts stays with it."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {
        name: copy.deepcopy(child) if _is_metric(child) else child for name, child in module._modules.items()
    }
    for name in ("log", "log_dict", "print"):
        twin.__dict__[name] = lambda *args, **kwargs: None
    return twin


def _is_metric(child: Any) -> bool:
    return any(base.__module__.startswith("torchmetrics") for base in type(child).__mro__)
