"""The official optimizers and learning rate, and the schedules that this loop adds; a step is one update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Adadelta, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from integrations.easyocr.settings import Settings

_FIRST = 1e-3  # the part of the learning rate that a warm-up begins with


def optimizer(parameters: Iterable[nn.Parameter], settings: Settings) -> Optimizer:
    """Adadelta (official default), Adam or AdamW over trainable parameters. The official Adam ignores `lr`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if settings.optim == "adadelta":
        return Adadelta(trained, lr=settings.lr, rho=settings.rho, eps=settings.eps)
    kind = Adam if settings.optim == "adam" else AdamW
    return kind(trained, lr=settings.lr, betas=(settings.beta1, 0.999), eps=settings.eps)


def schedule(settings: Settings) -> Callable[[Optimizer], LRScheduler] | None:
    """constant (official): None without a warm-up; onecycle: up over `warmup` updates, then down; cosine to zero."""
    updates, warmup = settings.num_iter, settings.warmup
    if settings.schedule == "onecycle":
        share = warmup / updates if warmup else 0.1

        def onecycle(steps: Optimizer) -> LRScheduler:
            rates = [group["lr"] for group in steps.param_groups]
            return OneCycleLR(steps, max_lr=rates, total_steps=updates + 1, pct_start=share, cycle_momentum=False)

        return onecycle
    if settings.schedule == "constant" and not warmup:
        return None

    def warmed(steps: Optimizer) -> LRScheduler:
        main: LRScheduler
        if settings.schedule == "cosine":
            main = CosineAnnealingLR(steps, T_max=max(1, updates - warmup))
        else:
            main = ConstantLR(steps, factor=1.0)
        if not warmup:
            return main
        return SequentialLR(steps, [LinearLR(steps, _FIRST, total_iters=warmup), main], milestones=[warmup])

    return warmed
