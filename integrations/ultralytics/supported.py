"""What the plug cannot serve, and what cannot be compiled."""

from __future__ import annotations

from typing import Any

from torch import nn
from ultralytics.nn.tasks import BaseModel

from integrations.contract import UnsupportedRun
from integrations.ultralytics import versions


def check_trainer(trainer: Any) -> None:
    """Refuse, in one line, what the plug cannot serve.

    Raises:
        UnsupportedRun
    """
    if compiles := getattr(trainer.args, "compile", False):
        raise UnsupportedRun(
            f"compile={compiles}: the host's own compile and the plug exclude each other; "
            "leave compile out and set accel.compile=on"
        )
    if versions.distils(trainer.model):
        raise UnsupportedRun("distill_model: not served by plugins.yolo; leave out callbacks=plugins.yolo")


def uncompilable(model: nn.Module) -> str:
    """Why this model's forward cannot be compiled, or empty."""
    if getattr(type(model), "loss", None) is not BaseModel.loss:
        return f"{type(model).__name__} passes labels into its forward, which is not compiled"
    return ""
