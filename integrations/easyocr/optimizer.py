"""The official optimizers and learning rate, and the schedules that this loop adds; a step is one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn
from torch.optim import Adadelta, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from integrations.easyocr.settings import Settings


def optimizer(parameters: Iterable[nn.Parameter], settings: Settings) -> Optimizer:
    """Adadelta (official default), Adam or AdamW over trainable parameters. The official Adam ignores `lr`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if settings.optim == "adadelta":
        return Adadelta(trained, lr=settings.lr, rho=settings.rho, eps=settings.eps)
    kind = Adam if settings.optim == "adam" else AdamW
    return kind(trained, lr=settings.lr, betas=(settings.beta1, 0.999), eps=settings.eps)


def schedule(settings: Settings) -> Callable[[Optimizer], LRScheduler] | None:
    """A factor on the learning rate as a function of the update alone, so that a resumed run may be a longer one.

    constant (official) after a linear warm-up; cosine: to zero after it; onecycle: up from 1/25 over `warmup` (a tenth
    of the run if none is given) and down to 1/250 000 by cosines (Smith and Topin 2017, as torch's OneCycleLR does).
    """
    total, warmup = settings.num_iter, settings.warmup
    if settings.schedule == "onecycle":
        rise = max(1, warmup or total // 10)
        return lambda steps: LambdaLR(steps, partial(_one_cycle, rise=rise, total=total))
    if settings.schedule == "cosine":
        return lambda steps: LambdaLR(steps, partial(_warmed, warmup=warmup, fall=max(1, total - warmup)))
    return (lambda steps: LambdaLR(steps, partial(_warmed, warmup=warmup, fall=0))) if warmup else None


def _warmed(update: int, warmup: int, fall: int) -> float:
    if update < warmup:
        return (update + 1) / (warmup + 1)
    return _between(1.0, 0.0, min(1.0, (update - warmup) / fall)) if fall else 1.0


def _one_cycle(update: int, rise: int, total: int) -> float:
    if update < rise:
        return _between(1 / 25, 1.0, update / rise)
    return _between(1.0, 1 / 250_000, min(1.0, (update - rise) / max(1, total - 1 - rise)))


def _between(start: float, end: float, share: float) -> float:
    """From `start` to `end` along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
