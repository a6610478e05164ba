"""What the plug cannot serve, and what cannot be compiled."""

from __future__ import annotations

from typing import Any

from torch import nn
from ultralytics.nn.distill_model import DistillationModel
from ultralytics.nn.tasks import BaseModel
from ultralytics.utils.torch_utils import unwrap_model

from integrations.seam import UnsupportedRun


def check_trainer(trainer: Any) -> None:
    """Refuse, in one line, what the plug cannot serve.

    Raises:
        UnsupportedRun
    """
    if trainer.args.compile:
        raise UnsupportedRun(
            f"compile={trainer.args.compile}: the host's own compile and the plug exclude each other; "
            "leave compile out and set accel.compile=on"
        )
    if isinstance(unwrap_model(trainer.model), DistillationModel):
        raise UnsupportedRun("distill_model: not served by plugins.yolo; leave out callbacks=plugins.yolo")


def uncompilable(model: nn.Module) -> str:
    """Why this model's forward cannot be compiled, or empty."""
    if getattr(type(model), "loss", None) is not BaseModel.loss:
        return f"{type(model).__name__} passes labels into its forward, which is not compiled"
    return ""
