"""What only the frames of the Trainer's callers know: events carry no trainer, and a run's arguments are locals.

Every way of looking there is in this file. Each rests on a function of the host, which tests/huggingface/test_frames.py
names and checks at the version that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def is_trainer(candidate: Any) -> bool:
    """True for a Trainer or a subclass, without importing it: what the callback needs is there."""
    return all(hasattr(candidate, name) for name in ("callback_handler", "compute_loss", "training_step", "args"))


def find_trainer() -> Any:
    """The Trainer among the callers, or None. Events carry no handle, but every event is fired by its methods."""
    return next((owner for frame in _callers() if is_trainer(owner := frame.f_locals.get("self"))), None)


def adding_trainer() -> Any:
    """The Trainer whose `add_callback` is running, or None; not one that is still being built."""
    for frame in _callers():
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "add_callback" and is_trainer(owner):
            return owner if hasattr(owner, "state") else None
    return None


def caller_local(owner: Any, function: str, name: str) -> Any:
    """The local variable `name` of the nearest caller that is `owner.function`, or None."""
    for frame in _callers():
        if frame.f_code.co_name == function and frame.f_locals.get("self") is owner and name in frame.f_locals:
            return frame.f_locals[name]
    return None


def _callers() -> Iterator[FrameType]:
    """From the nearest caller outwards; this file's own frames hold no `self`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
