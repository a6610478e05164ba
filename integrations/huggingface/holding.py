"""Taking hold of a Trainer: finding it from a callback's event, and patching the instance with a way back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from integrations.patches import Patches


def is_trainer(candidate: Any) -> bool:
    """True for a Trainer or a subclass, without importing it: what the callback needs is there."""
    return all(hasattr(candidate, name) for name in ("callback_handler", "compute_loss", "training_step", "args"))


def find_trainer() -> Any:
    """The Trainer among the callers, or None. Events carry no handle, but every event is fired by its methods."""
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if candidate is not None and is_trainer(candidate):
            return candidate
        frame = frame.f_back
    return None


def adding_trainer() -> Any:
    """The Trainer whose `add_callback` is running, or None; not one that is still being built."""
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if frame.f_code.co_name == "add_callback" and candidate is not None and is_trainer(candidate):
            return candidate if hasattr(candidate, "state") else None
        frame = frame.f_back
    return None


def caller_local(owner: Any, function: str, name: str) -> Any:
    """The local variable `name` of the nearest caller that is `owner.function`, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_locals.get("self") is owner and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def of_host(method: Any) -> bool:
    """Whether a Trainer's method, looked at beneath our patches, is the host's own: no subclass's, no user's."""
    from transformers import Trainer

    while getattr(method, "ours", False):
        method = method.__wrapped__
    return getattr(method, "__func__", None) is getattr(Trainer, method.__name__, None)


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

        patched.__wrapped__ = original  # type: ignore[attr-defined]  # the host inspects signatures
        patched.__dict__["ours"] = True
        patched.__name__ = name
        self._patches.put(self.target, name, patched)

    def value(self, name: str, value: Any) -> None:
        """Set an attribute on the instance."""
        self._patches.put(self.target, name, value)

    def undo(self) -> None:
        """Put everything back, the latest patch first. Safe to call twice."""
        self._patches.undo()

    def names(self) -> list[str]:
        return self._patches.names()
