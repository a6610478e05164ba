"""What a micro-batch's loss weighs: put right as its backward begins, whoever divided it by K before.

The host, or a `training_step` of the user's own, may have divided the loss by the micro-batches of the window, or not.
The gradient that arrives at the loss tells. So neither the loss that a user's code sees nor a setting of the
trainer (`loss_is_scaled_for_ga`) is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from integrations.huggingface.deepspeed import is_deepspeed, loss_scale
from integrations.huggingface.loss_rules.observation import Seen

NEAR = 1e-2
"""A factor this near to 1 or 1/K is that factor, rounded."""


@dataclass(frozen=True)
class Share:
    """What a micro-batch's loss has to be multiplied by, in all.

    Attributes:
        gradient: of its backward; 0-dim where terms were counted on a device.
        logged: the value that the host adds up for its log, beside that.
    """

    gradient: float | Tensor
    logged: float | Tensor = 1.0

    @property
    def whole(self) -> bool:
        """Whether the loss stays as it is; what lies on a device is not asked."""
        return all(not isinstance(factor, Tensor) and factor == 1.0 for factor in (self.gradient, self.logged))


class Scaling:
    """Corrects losses of one training step, and remembers by what.

    Args:
        trainer: the host's.
        odd: called where a user's own training step scales the loss by another factor than 1 or 1/K.
    """

    def __init__(self, trainer: Any, odd: Callable[[], None]) -> None:
        self.trainer, self.odd = trainer, odd
        self._logged: Tensor | float = 1.0
        self._own_step = False

    def begin(self, training_step: Any) -> None:
        """A training step begins; the trainer's own, without the plug's."""
        self._logged = 1.0
        self._own_step = own_method(training_step, "training_step")

    def logged(self, loss: Any) -> Any:
        """What the training step returned, for the log: corrected as its gradient was."""
        return loss * self._logged if isinstance(loss, Tensor) else loss

    def correct(self, loss: Tensor, share: Share, micro_batches: int) -> None:
        """From now on the backward of `loss` brings its share, in a window of K = `micro_batches`."""
        if not loss.requires_grad:
            return
        own = self._own_step

        def arrives(gradient: Tensor) -> Tensor:
            plain = torch.ones_like(gradient)
            unit = self._unit(plain)  # of a loss that nobody divided
            whole = (gradient / unit - 1).abs() < NEAR
            divided = (gradient / unit * micro_batches - 1).abs() < NEAR
            usual = whole | divided
            if own and not bool(usual.all()):
                self.odd()
            weight = share.gradient.to(gradient) if isinstance(share.gradient, Tensor) else share.gradient
            whole_share = unit * weight
            factor = torch.where(usual, whole_share / gradient, plain * (weight * micro_batches))
            self._logged = factor.detach().reshape(-1)[0] * share.logged
            return torch.where(usual, whole_share, gradient * factor)

        loss.register_hook(arrives)

    def _unit(self, plain: Tensor) -> Tensor:
        """What arrives at a loss that is only scaled, by whom the host lets scale."""
        if is_deepspeed(self.trainer):
            return plain * loss_scale(self.trainer)
        scaler = self.trainer.accelerator.scaler
        return plain if scaler is None else scaler.scale(plain)  # type: ignore[no-any-return]


def own_method(method: Any, name: str) -> bool:
    """True where a method of a trainer is not the host's: of a subclass, or put on the trainer itself."""
    from transformers import Trainer

    return getattr(method, "__func__", None) is not getattr(Trainer, name)


def says_scaled(trainer: Any, compute_loss: Any) -> bool:
    """True where the user's own code may have divided by K already: it says so, or it looks K up."""
    declared = None
    with suppress(Exception):
        declared = trainer.loss_is_scaled_for_ga
    return bool(declared) or any(
        name.endswith("gradient_accumulation_steps")
        for code in _own_code(trainer, compute_loss)
        for name in code.co_names
    )


def _own_code(trainer: Any, compute_loss: Any) -> Iterator[types.CodeType]:
    """The code of what may make up the loss: methods of the trainer's own classes, and its loss function."""
    found: list[Any] = [getattr(compute_loss, "__func__", compute_loss), trainer.compute_loss_func]
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith("transformers."):
            found += [value for name, value in vars(kind).items() if name not in ("training_step", "__init__")]
    for value in found:
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        if isinstance(code := getattr(value, "__code__", None), types.CodeType):
            yield from _nested(code)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def loss_of(found: Any) -> Tensor:
    """The loss in what `compute_loss` returned."""
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def no_terms(found: Any, seen: Seen) -> Any:
    """A loss of zero that reaches the same parameters: a mean over no term at all would be NaN."""
    values: list[Any] = []
    for outputs in seen.outputs:
        values += outputs.values() if isinstance(outputs, Mapping) else outputs
    logits = [v for v in values if isinstance(v, Tensor) and v.dim() and v.is_floating_point() and v.requires_grad]
    zero = sum((v.float().sum() * 0.0 for v in logits), torch.zeros((), device=loss_of(found).device))
    return (zero, *found[1:]) if isinstance(found, tuple) else zero


def none_as_zero(found: Any, terms: Tensor) -> Any:
    """The loss as zero, with no gradient in its backward, where it is a mean over no term at all: nothing is read.

    Args:
        found: what `compute_loss` returned.
        terms: 0-dim.
    """
    loss = loss_of(found)
    kept = torch.where(terms.to(loss.device) > 0, loss, torch.zeros_like(loss))
    return (kept, *found[1:]) if isinstance(found, tuple) else kept
