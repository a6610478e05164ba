"""Patches on instances, listed as they are put on and undone in reverse.

A copy or a pickle of a patched object is the object as it was before: Python asks an object for `__getstate__`, on the
instance too, whatever copies it (`copy`, `deepcopy`, `pickle`, `torch.save`), and a patched one answers without what is
listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()
_STATE = "__getstate__"


class Around:
    """A function around `owner.name` that stays on the outside when a user puts another one there.

    `around(inner, ...)` decides when `inner`, the owner's function or the user's, is called. A user's function that
    goes on to the one that it found, as wrappers do, comes through here again and reaches that one.

    Args:
        owner: the object that is patched.
        name: of its method.
        around: gets the inner function, then the arguments of the call.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self.owner, self.name, self.around = owner, name, around
        self._inner: list[Callable[..., Any]] = [getattr(owner, name)]  # the owner's own, then users', in their order
        self._at: int | None = None  # inside a call: which of them is running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._at is not None:
            return self._descend(*args, **kwargs)
        return self.enter(self.around, *args, **kwargs)

    def enter(self, around: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `around` in the place of the function that was given at first."""
        self._at = len(self._inner)
        try:
            return around(self._descend, *args, **kwargs)
        finally:
            self._at = None

    @property
    def inner(self) -> Callable[..., Any]:
        """What the owner would call if this were not here."""
        return self._inner[-1]

    def stay(self) -> bool:
        """Come outside again where a user has put a function over this one; whether there was one."""
        found = getattr(self.owner, self.name)
        if found is self:
            return False
        self._inner.append(found)
        setattr(self.owner, self.name, self)
        return True

    def _descend(self, *args: Any, **kwargs: Any) -> Any:
        before = self._at
        self._at = max((before or 1) - 1, 0)
        try:
            return self._inner[self._at](*args, **kwargs)
        finally:
            self._at = before


class Patches:
    """`put` sets an attribute of one object and remembers what it held; `undo` puts everything back."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is

    def put(self, owner: Any, name: str, value: Any) -> Any:
        """Set `owner.name`; returns what it was (a bound method where the class provides it)."""
        before = getattr(owner, name)
        self._set(owner, name, value)
        if type(owner).__module__ != "builtins" and not self._has(owner, _STATE):
            self._set(owner, _STATE, self._state_without(owner, getattr(owner, _STATE)))
        return before

    def around(self, owner: Any, name: str, function: Callable[..., Any]) -> Around:
        """Put `function(inner, ...)` around the method `owner.name`, to stay on the outside of what users put there."""
        value = Around(owner, name, function)
        self.put(owner, name, value)
        return value

    def undo(self) -> None:
        while self._put:
            owner, name, before, _ = self._put.pop()
            _restore(owner, name, before)

    @contextmanager
    def lifted(self, owner: Any) -> Iterator[None]:
        """Inside, `owner` is without its patches."""
        ours = [(name, before, vars(owner)[name]) for o, name, before, _ in self._put if o is owner]
        for name, before, _ in reversed(ours):
            _restore(owner, name, before)
        try:
            yield
        finally:
            for name, _, value in ours:
                setattr(owner, name, value)

    def names(self) -> list[str]:
        """What is patched now: `Class.attribute`."""
        return [
            f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
            for owner, name, _, _ in self._put
            if name != _STATE
        ]

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._put.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def _has(self, owner: Any, name: str) -> bool:
        return any(o is owner and n == name for o, n, _, _ in self._put)

    def _state_without(self, owner: Any, state_of: Callable[[], Any]) -> Callable[[], Any]:
        """`__getstate__` of an object as if nothing listed here were on it."""

        def state() -> Any:
            found = state_of()
            if isinstance(found, tuple) and found and isinstance(found[0], dict):  # of a class with slots
                return (self._without(owner, found[0]), *found[1:])
            return self._without(owner, found) if isinstance(found, dict) else found

        return state

    def _without(self, owner: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = dict(state)
        for _, name, before, value in reversed([put for put in self._put if put[0] is owner]):
            if state.get(name, _ABSENT) is not value:
                continue  # a user's own
            if isinstance(value, Around) and len(value._inner) > 1:
                state[name] = value.inner
            elif before is _ABSENT:
                del state[name]
            else:
                state[name] = before
        return state


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
