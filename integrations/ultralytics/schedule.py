"""Sizes and rates counted in updates: micro-batches a window, weight decay, warm-up, learning-rate scale."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from integrations.shared.batch_size import micro_batches_per_update
from integrations.shared.learning_rate import rate_factor
from integrations.ultralytics import versions


def window_size(config: Any, batch: int, rounded: bool = False) -> int | None:
    """K for this batch, or None where the host's own rule holds (`nbs`).

    `rounded`: the user did not choose this batch, and the effective batch is rounded up.

    Raises:
        UnsupportedRun: an effective batch that is no multiple of the batch.
    """
    allowed = f"allowed are {batch}, {2 * batch}, ..."
    return micro_batches_per_update(config, batch, host=None, named=f"batch={batch}", allowed=allowed, rounded=rounded)


def chosen_by_host(trainer: Any) -> bool:
    """Whether the host found this batch by the memory that was free (`batch=-1`); its args.yaml has what was asked."""
    path = trainer.save_dir / "args.yaml"
    return path.is_file() and float(versions.read_yaml(path).get("batch", 1)) < 1


def set_weight_decay(trainer: Any, effective: int) -> None:
    """The host's rule (decay times effective batch over nbs) for the effective batch that is in force."""
    args, batch = trainer.args, trainer.batch_size
    decay = args.weight_decay * effective / args.nbs
    host_decay = args.weight_decay * batch * max(round(args.nbs / batch), 1) / args.nbs
    for group in trainer.optimizer.param_groups:
        if versions.decays(group, host_decay):
            group["weight_decay"] = decay


def scale_learning_rate(trainer: Any, rule: str, ratio: float) -> None:
    """Multiply the base rates by `ratio` (linear) or its root (sqrt): effective batch over the host's own."""
    factor = rate_factor(rule, ratio)
    if factor == 1.0:
        return
    bases = [base * factor for base in trainer.scheduler.base_lrs]
    trainer.scheduler.base_lrs = bases
    for group, base in zip(trainer.optimizer.param_groups, bases, strict=True):
        group["initial_lr"] = base


def host_window(trainer: Any, index: int, nominal: int) -> int:
    """Micro-batches an update by the host's rule, which ramps from 1 to `nominal` in warm-up.

    `index` is the micro-batch's in its epoch.
    """
    batches = len(trainer.train_loader)
    warm_up_batches, at = versions.warmup_iterations(trainer, batches), index + batches * trainer.epoch
    if warm_up_batches and at <= warm_up_batches:
        return max(1, int(np.interp(at, [0, warm_up_batches], [1, versions.top_of_ramp(trainer, nominal)]).round()))
    return nominal


class Held(int):
    """The trainer's `accumulate` while the plug closes windows; any other number was set by the host or a user."""


EVERY = Held(1)  # the host calls optimizer_step after every micro-batch


def hold_accumulate(trainer: Any, index: int) -> int | None:
    """Hold `accumulate`; returns what a callback has set it to since, which the host's warm-up would overrule."""
    found, trainer.accumulate = trainer.accumulate, EVERY
    batches = len(trainer.train_loader)
    warm_up_batches = versions.warmup_iterations(trainer, batches)
    in_warm_up = warm_up_batches and index + batches * trainer.epoch <= warm_up_batches
    return None if found is EVERY or in_warm_up else max(1, math.ceil(found))


def warm_up(trainer: Any, update: int, an_epoch: float) -> None:
    """Set rates and momenta for this update, as the host would for the same update of a run on big batches.

    The host interpolates over micro-batches; its rule is kept, the index is the update's, `an_epoch` updates an epoch.
    """
    updates = versions.warmup_iterations(trainer, an_epoch)
    if not updates or update > updates:
        return
    span, args = [0, updates], trainer.args
    for group in trainer.optimizer.param_groups:
        start = args.warmup_bias_lr if versions.warms_up_as_bias(trainer, group) else 0.0
        group["lr"] = float(np.interp(update, span, [start, group["initial_lr"] * trainer.lf(trainer.epoch)]))
        if "momentum" in group:
            group["momentum"] = float(np.interp(update, span, [args.warmup_momentum, args.momentum]))
