"""What a hand-written loop cannot be given, each in one line, before anything is trained."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from plugins.core.system.sharding import holds_shards
from plugins.errors import AccelError


def bare_module(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile(model)` and DataParallel, whose names the checkpoint has.

    Raises:
        AccelError: DistributedDataParallel or FSDP around it.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            raise AccelError("model=DistributedDataParallel: give the bare module; gradients are reduced here")
        if type(model).__name__ == "FullyShardedDataParallel":
            raise AccelError("model=FullyShardedDataParallel: not supported; shard the bare module by fully_shard")
        if "_orig_mod" in model._modules:  # what torch.compile gives; its class is slow to import
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, DataParallel):
            model = model.module
        else:
            return model


def check_layout(model: nn.Module, memory_format: str) -> None:
    """Raises AccelError on another storage order for a model that `fully_shard` has laid out."""
    if memory_format == "channels_last" and holds_shards(model):
        raise AccelError("memory_format=channels_last: fully_shard has laid the weights out; allowed are auto and host")


def check_model(model: nn.Module) -> None:
    """Raises AccelError on a model without parameters, or one whose parameters have no shape yet."""
    name = type(model).__name__
    if next(model.parameters(), None) is None:
        raise AccelError(f"model={name}: has no parameters to train")
    for what, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise AccelError(f"model={name}: {what} has no shape yet (a lazy module); run one batch through it first")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises AccelError on an optimizer that evaluates the loss itself, or whose parameters have no shape yet."""
    name = type(optimizer).__name__
    if "closure" in _needed(type(optimizer).step):
        raise AccelError(
            f"optimizer={name}: its step needs a closure that evaluates the loss again; use one that steps from "
            "gradients (SGD, AdamW, ...)"
        )
    if any(is_lazy(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise AccelError(f"optimizer={name}: holds a parameter that has no shape yet; run one batch through it first")


def check_schedule(scheduler: Any) -> None:
    """Raises AccelError on a schedule that needs more than to be stepped (ReduceLROnPlateau: a metric)."""
    if scheduler is not None and (needed := _needed(type(scheduler).step)):
        raise AccelError(
            f"schedule={type(scheduler).__name__}: its step needs {', '.join(needed)}; leave schedule out and step it "
            "yourself, after validation"
        )


def check_loss(loss: Any) -> None:
    """Raises AccelError on what is no mean loss."""
    if not isinstance(loss, Tensor):
        raise AccelError(
            f"backward: the loss is {type(loss).__name__}: expected a tensor with one number, or a list of (mean loss, "
            "targets)"
        )
    if loss.numel() != 1:
        raise AccelError(
            f"backward: a loss of shape {list(loss.shape)}: expected one number, the mean over its targets"
        )


def check_accumulate(count: Any) -> None:
    """Raises AccelError on what is no count of micro-batches."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise AccelError(f"accumulate={count!r}: expected micro-batches an update, 1 or more")


def check_weight(weight: Any) -> None:
    """Raises AccelError on what is no count of targets."""
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise AccelError(f"backward: weight of shape {list(weight.shape)}: expected one count of targets")
    if not isinstance(weight, Tensor) and not (isinstance(weight, Real) and 0 <= float(weight) < math.inf):
        raise AccelError(f"backward: weight={weight!r}: expected a count of targets, 0 or more")


def _needed(function: Callable[..., Any]) -> list[str]:
    """Arguments without a default, `self` apart."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in plain]
