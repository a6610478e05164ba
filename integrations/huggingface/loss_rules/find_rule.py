"""Whose loss it is, and how the loss of a library's head is counted: by its name, checked on a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor

from integrations.huggingface import versions
from integrations.huggingface.gradient_scaling import own_method
from integrations.huggingface.loss_rules import counting
from integrations.huggingface.loss_rules.counting import Counting
from integrations.huggingface.loss_rules.evidence import Evidence, ranks
from integrations.huggingface.loss_rules.head_probe import HOST, LATER, TOLERANCE, fits, invisible_copy, probe
from integrations.huggingface.loss_rules.observation import Seen
from integrations.huggingface.sharding import is_sharded
from integrations.precision_layout import DTYPES


class Finding(Enum):
    """What is known of a run's loss."""

    OPEN = "nothing yet"
    COUNTED = "a library's head: its terms are counted"
    OBSERVED = "the user's, or of an unknown kind: it is watched as the host runs it"
    HOST = "the host's own way"


def of_the_user(trainer: Any, compute_loss: Any) -> bool:
    """True where the user wrote the loss, and not only, perhaps, the model."""
    return own_method(compute_loss, "compute_loss") or trainer.compute_loss_func is not None


def own_count(trainer: Any) -> bool:
    """True where the user counts the terms of a window; looked at beneath the plug's patch."""
    if not versions.COUNT.here:
        return False
    method = trainer._get_num_items_in_batch
    while getattr(method, "ours", False):
        method = method.__wrapped__
    return own_method(method, "_get_num_items_in_batch")


def multiplied(trainer: Any, compute_loss: Any, seen: Seen, evidence: Evidence) -> float:
    """By what the host has multiplied a loss that its count is meant to divide: the ranks, or 1.

    It does so whether the loss is divided by the count or not.
    """
    if ranks() == 1 or seen.number is None or not trainer.args.average_tokens_across_devices:
        return 1.0
    if not own_method(compute_loss, "compute_loss"):
        return float(ranks() if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func else 1)
    return evidence.multiplied(seen)  # by a user's method that goes on to the host's


def find_rule(
    trainer: Any, batches: Sequence[Any], compute_loss: Callable[..., Any]
) -> tuple[Finding, Counting | None, tuple[str, ...]]:
    """(finding, its rule, terms that cannot be exact). All ranks get one answer; nothing of it can be seen outside."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    own_loss = "_loss_function" in vars(counting.base(model))
    smoother = trainer.label_smoother
    own_smoother = smoother is not None and not type(smoother).__module__.startswith("transformers.")
    if of_the_user(trainer, compute_loss) or own_loss or own_smoother or own_count(trainer):
        return Finding.OBSERVED, None, ()
    rule = counting.for_model(model, dict(batches[0]), smoother is not None and "labels" in batches[0])
    sharded = is_sharded(trainer)  # of which there is no copy
    copied = None if sharded else invisible_copy(model)
    if copied is None and not sharded:
        return Finding.OBSERVED, None, ()
    return _of_first_rank(_checked(trainer, copied, rule, batches, compute_loss))


def _checked(
    trainer: Any, copied: Any, rule: Counting | None, batches: Sequence[Any], compute_loss: Callable[..., Any]
) -> tuple[Finding, Counting | None, tuple[str, ...]]:
    if rule is not None and (copied is None or rule.inexact):
        return Finding.COUNTED, rule, rule.inexact
    if copied is None:
        return Finding.OBSERVED, None, ()
    ask, batch, within = asked(trainer, copied, batches, compute_loss)
    # False only where the loss was seen to add up in another way
    if rule is not None and fits(ask, batch, copied, rule, within) is not False:
        return Finding.COUNTED, rule, ()
    found = probe(ask, batch, copied, within)
    if isinstance(found, Counting):
        return Finding.COUNTED, found, ()
    return {LATER: Finding.OPEN, HOST: Finding.HOST}.get(str(found), Finding.OBSERVED), None, ()


def asked(
    trainer: Any, copied: Any, batches: Sequence[Any], compute_loss: Callable[..., Any]
) -> tuple[Callable[..., Tensor], dict[str, Any], float]:
    """(the host's loss of the copy as a function of inputs and a count, the largest micro-batch, a tolerance)."""
    batch = send_to_device(
        _widest(batches), trainer.args.device
    )  # not by the trainer's method, which may be the user's

    def ask(inputs: dict[str, Any], number: Any) -> Tensor:
        # the host multiplies by the number of processes only where it passes a count to a loss that takes one
        with trainer.accelerator.autocast():
            loss: Tensor = compute_loss(copied, inputs, num_items_in_batch=number)
        scaled = number is not None and trainer.args.average_tokens_across_devices
        return loss / (trainer.accelerator.num_processes if scaled and trainer.model_accepts_loss_kwargs else 1)

    return ask, batch, tolerance(trainer)


def tolerance(trainer: Any) -> float:
    """Relative; what rounding in the run's precision may change of a loss, and a little more."""
    mixed = DTYPES.get(trainer.accelerator.mixed_precision)
    dtype = mixed or next((p.dtype for p in trainer.model.parameters() if p.is_floating_point()), torch.float32)
    return max(TOLERANCE, 4 * torch.finfo(dtype).eps)


def _widest(batches: Sequence[Any]) -> dict[str, Any]:
    """The micro-batch of most samples; of single samples two together, where they have one shape."""
    widest = max((dict(batch) for batch in batches), key=counting.samples)
    if counting.samples(widest) > 1 or len(batches) < 2:
        return widest
    try:
        return {name: torch.cat([batch[name] for batch in batches[:2]]) for name in widest}
    except (TypeError, RuntimeError, KeyError):
        return widest


def _of_first_rank(found: Any) -> Any:
    """Ranks look at batches of their own, and have to follow one rule: counting is a collective."""
    if ranks() == 1:
        return found
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return told[0]
