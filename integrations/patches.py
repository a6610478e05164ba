"""Patches on instances, listed as they are put on and undone in reverse."""

from __future__ import annotations

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
            owner, name, before = self._put.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def names(self) -> list[str]:
        """What is patched now: `Class.attribute`."""
        return [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name, _ in self._put]
