"""Who clips the gradient of a window, once it is put right: the plug in the host's place, or the trainer's method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from integrations.huggingface import versions
from integrations.huggingface.deepspeed import is_deepspeed
from integrations.huggingface.patches import Held, beneath, of_host
from integrations.huggingface.sharding import is_sharded


def by_host(trainer: Any, clip_norm: str | float) -> bool:
    """Whether the trainer's own method clips, given the setting `clip_norm`.

    The user wrote it (a `_clip_grad_norm`, or a `clip_grad_norm_` put on the accelerator): it runs as the host runs it,
    at any setting. Or the optimizer holds other parameters than the model, less or more (those of a loss), and the host
    clips the model's by their own norm; but only where the setting leaves clipping to the host.
    """
    if versions.GRAD_NORM.here and not of_host(trainer._clip_grad_norm):
        return True
    clips = beneath(trainer.accelerator.clip_grad_norm_)
    if getattr(clips, "__func__", None) is not Accelerator.clip_grad_norm_:
        return True
    return clip_norm == "host" and _holds_others(trainer)


def _holds_others(trainer: Any) -> bool:
    if is_sharded(trainer) or is_deepspeed(trainer):
        return False
    held = (p for group in trainer.optimizer.param_groups for p in group["params"])
    of_both = [{id(p) for p in found if p.grad is not None} for found in (held, trainer.model.parameters())]
    return of_both[0] != of_both[1]


def limit(trainer: Any, hosts: bool) -> float | None:
    """L2 norm at which the plug clips in the host's place; None where that is the `hosts`, or nothing is clipped."""
    norm = trainer.args.max_grad_norm or 0
    return float(norm) if norm > 0 and not hosts else None


@contextmanager
def unscaled(trainer: Any) -> Iterator[None]:
    """Inside, accelerate does not unscale gradients (fp16): they are unscaled already."""
    held = Held(trainer.accelerator)
    held.method("unscale_gradients", lambda original, optimizer=None: None)
    try:
        yield
    finally:
        held.undo()
