"""The model's own calls in one micro-batch, to be made again for timing: the user's loss runs once, and never again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plugins.loop.nested import mapped, tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Replay:
    """Notes how a loss calls the model, and calls it in the same way.

    Args:
        model: the bare module.
        place: puts a tensor where, and as, the model takes it now.
    """

    def __init__(self, model: nn.Module, place: Callable[[Any], Any]) -> None:
        self.model, self.place = model, place
        self.calls: list[Call] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, calls of the model that have a gradient are noted, in place of those of the micro-batch before."""
        noted: list[Call] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                noted.append((mapped(args, _leaf), mapped(kwargs, _leaf)))
            return (there or self.model._call_impl)(*args, **kwargs)

        there = vars(self.model).get("_compiled_call_impl")
        self.model._compiled_call_impl = call  # type: ignore[assignment]
        try:
            yield
        finally:
            del self.model._compiled_call_impl
            if there is not None:
                self.model._compiled_call_impl = there
        self.calls = noted

    def loss(self) -> Tensor:
        """A number whose backward goes through all that the model returned: the mean square of each tensor, summed."""
        total = torch.zeros(())
        for args, kwargs in self.calls:
            found = tensors(self.model(*self.place(args), **self.place(kwargs)))
            for out in found:
                if out.requires_grad:
                    total = total.to(out.device) + (out.abs() if out.is_complex() else out).float().square().mean()
        return total

    def forget(self) -> None:
        """Let the noted inputs go."""
        self.calls = []


def hooked(model: nn.Module) -> str:
    """The module or parameter with a hook of the user's, which every call or backward of a trial would run; or empty.

    A hook may keep what it sees in a list, or step an optimizer in the backward. Torch's own keep nothing.
    """
    for name, module in model.named_modules():
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(_of_the_user(hook) for hooks in kinds for hook in hooks.values()):
            return name or type(module).__name__
    for name, parameter in model.named_parameters():
        found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if any(_of_the_user(hook) for hooks in found for hook in (hooks or {}).values()):
            return name
    return ""


def _of_the_user(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).partition(".")[0] not in ("torch", "plugins", "integrations")


def _leaf(value: Tensor) -> Tensor:
    """The same values without the graph that they came from."""
    return value.detach().requires_grad_(value.requires_grad)
