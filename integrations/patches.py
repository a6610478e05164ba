"""Patches on instances, listed as they are put on and undone in reverse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Patches:
    """`put` sets an attribute of one object and remembers what it held; `undo` puts everything back."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> Any:
        """Set `owner.name`; returns what it was (a bound method where the class provides it)."""
        before = getattr(owner, name)
        self._put.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)
        return before

    def undo(self) -> None:
        while self._put:
            _restore(*self._put.pop())

    @contextmanager
    def lifted(self, owner: Any) -> Iterator[None]:
        """Inside, `owner` is without its patches (to be copied, or pickled)."""
        ours = [(name, before, vars(owner)[name]) for o, name, before in self._put if o is owner]
        for name, before, _ in reversed(ours):
            _restore(owner, name, before)
        try:
            yield
        finally:
            for name, _, value in ours:
                setattr(owner, name, value)

    def names(self) -> list[str]:
        """What is patched now: `Class.attribute`."""
        return [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name, _ in self._put]


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
