"""What compiling and checkpointing ask of a model of transformers: no cache, and to know when it generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from integrations.contract import Session
from integrations.huggingface.patches import Held


def without_cache(model: Any) -> list[Held]:
    """A cache of keys and values is of no use in training, changes what a compiler sees, and is filled by a forward.

    Returns:
        What was put on the model's config, to be undone.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        return []
    held = Held(config)
    held.value("use_cache", False, hidden=False)
    return [held]


def in_place_zeros(model: Any, session: Session) -> Held:
    """The host drops gradients after every step; while CUDA graphs run they are zeroed in place instead.

    Args:
        model: whose `zero_grad` the host calls.
        session: of the run.

    Returns:
        What was put on it, to be undone.
    """
    held = Held(model)
    held.method("zero_grad", lambda original, set_to_none=True: original(set_to_none and not session.keeps_gradients))
    return held


class Generation:
    """Whether a model's `generate` is running: its calls are never compiled."""

    def __init__(self) -> None:
        self.running = False

    def hold(self, model: Held) -> None:
        """Watch `generate` of this model, where it has one."""
        if hasattr(model.target, "generate"):
            model.method("generate", self._generate)

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.running = self.running, True
        try:
            return original(*args, **kwargs)
        finally:
            self.running = before
