"""Patches on one object of the Trainer's, with a way back, and whether a method is still the host's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from integrations.patches import Patches


def of_host(method: Any) -> bool:
    """Whether a Trainer's method, looked at beneath our patches, is the host's own: no subclass's, no user's."""
    from transformers import Trainer

    function = getattr(beneath(method), "__func__", None)  # a function put on the trainer has none, nor has a partial
    return function is not None and function is getattr(Trainer, getattr(function, "__name__", ""), None)


def beneath(method: Any) -> Any:
    """A method without our patches on it."""
    while getattr(method, "ours", False):
        method = method.__wrapped__
    return method


def passes_on(trainer: Any) -> bool:
    """Whether a micro-batch comes to `compute_loss` as it was fetched: no method of the user's has it before."""
    return all(of_host(getattr(trainer, name)) for name in ("training_step", "_prepare_inputs", "_prepare_input"))


def of_library(method: Any) -> bool:
    """Whether a method is written in transformers, in `Trainer` or in one of its own subclasses."""
    module = str(getattr(getattr(method, "__func__", None), "__module__", ""))
    return module.startswith("transformers.")


class Held:
    """Patches on one object: methods that get the original, bound, as their first argument, and plain values.

    `copied` is told of every deep copy of the object, which is as the object was before.
    """

    def __init__(self, target: Any, copied: Callable[[Any], None] | None = None) -> None:
        self.target = target
        self._patches = Patches(copied)

    def method(self, name: str, replacement: Callable[..., Any]) -> None:
        """Replace `target.name(*args)` by `replacement(original, *args)`."""
        original = getattr(self.target, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        patched.__dict__.update(getattr(original, "__dict__", {}))  # marks, such as a scheduler's on a step
        patched.__wrapped__ = original  # type: ignore[attr-defined]  # the host inspects signatures
        patched.__dict__["ours"] = True
        patched.__name__ = name
        self._patches.put(self.target, name, patched)

    def value(self, name: str, value: Any, hidden: bool = True) -> None:
        """Set an attribute on the instance, `hidden` from its copies: see `Patches.put`."""
        self._patches.put(self.target, name, value, hidden)

    def undo(self) -> None:
        """Put everything back, the latest patch first. Safe to call twice."""
        self._patches.undo()

    def names(self) -> list[str]:
        """Of the methods and values that are patched now."""
        return self._patches.names()


def bare_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer") and hasattr(optimizer, "step_was_skipped"):
        optimizer = optimizer.optimizer
    return optimizer
