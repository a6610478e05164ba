"""Patches on instances, listed as they are put on and undone in reverse. A copy or pickle of an owner has none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


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
        self._without_users = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers outermost first; a call from inside goes one layer further in."""
        if self._at is not None:
            return self._descend(*args, **kwargs)
        return self.enter(self.around, *args, **kwargs)

    def enter(self, around: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `around` in the place of the function that was given at first."""
        self._at = 1 if self._without_users else len(self._inner)
        try:
            return around(self._descend, *args, **kwargs)
        finally:
            self._at = None

    @property
    def inner(self) -> Callable[..., Any]:
        """What the owner would call if this were not here."""
        return self._inner[-1]

    @property
    def users(self) -> bool:
        """Whether a user put a function there."""
        return len(self._inner) > 1

    @contextmanager
    def without_users(self) -> Iterator[None]:
        """Inside, users' functions are not called: what runs there is no call that the owner would make."""
        self._without_users = True
        try:
            yield
        finally:
            self._without_users = False

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


class NotCopied:
    """Holds one run of one owner: a copy or pickle of what refers to it has None in its place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class Hook:
    """A callback of one run, among those of its owner: in a copy or pickle of the owner it does nothing.

    Args:
        function: is called in its place.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


def nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a Hook in a copy."""


def _nothing() -> Callable[..., None]:
    return nothing


class Patches:
    """`put` sets an attribute of one object and remembers what it held; `undo` puts everything back.

    Args:
        copied: told of every deep copy of an owner, which is as the owner was before.
    """

    def __init__(self, copied: Callable[[Any], None] | None = None) -> None:
        self._put: list[_Patch] = []
        self._copied = copied

    def put(self, owner: Any, name: str, value: Any, hidden: bool = True) -> Any:
        """Set `owner.name`; returns what it was (a bound method where the class provides it).

        Args:
            owner: an object, or a module.
            name: of its attribute.
            value: in its place.
            hidden: from copies and pickles of the owner; False for an owner whose attributes are written out as they
                are (a config), where what hides them would be written too.
        """
        before = getattr(owner, name)
        patch = _Patch(owner, name, vars(owner).get(name, _ABSENT), value, self._copied)
        self._put.append(patch)
        setattr(owner, name, value)
        if hidden and not isinstance(owner, type):
            _Copies.of(owner).add(patch)
        return before

    def around(self, owner: Any, name: str, function: Callable[..., Any]) -> Around:
        """Put `function(inner, ...)` around the method `owner.name`, to stay on the outside of what users put there."""
        value = Around(owner, name, function)
        self.put(owner, name, value)
        return value

    def undo(self) -> None:
        """Take everything off, the latest first."""
        while self._put:
            patch = self._put.pop()
            patch.restore()
            _Copies.of(patch.owner).remove(patch)

    @contextmanager
    def lifted(self, owner: Any) -> Iterator[None]:
        """Inside, `owner` is without its patches, and without what was set over them."""
        with _Copies.of(owner).lifted(covered=True):
            yield

    def names(self) -> list[str]:
        """What is patched now: `Class.attribute`."""
        return [f"{getattr(p.owner, '__name__', type(p.owner).__name__)}.{p.name}" for p in self._put]


@dataclass(eq=False)
class _Patch:
    owner: Any
    name: str
    before: Any
    value: Any
    copied: Callable[[Any], None] | None

    def restore(self) -> None:
        if self.before is not _ABSENT:
            setattr(self.owner, self.name, self.before)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class _Copies:
    """Makes the copies and pickles of one owner, which are without the patches on it, whoever put them there.

    `copy` and `pickle` ask the instance for `__deepcopy__` and `__reduce_ex__` before they ask its class.
    """

    def __init__(self, owner: Any) -> None:
        self.owner, self.patches = owner, list[_Patch]()
        self.hooks = {"__deepcopy__": self._deepcopy, "__reduce_ex__": self._reduce}

    @classmethod
    def of(cls, owner: Any) -> _Copies:
        found = getattr(vars(owner).get("__reduce_ex__"), "__self__", None)
        return found if isinstance(found, cls) else cls(owner)

    def add(self, patch: _Patch) -> None:
        self.patches.append(patch)
        vars(self.owner).update(self.hooks)

    def remove(self, patch: _Patch) -> None:
        if patch not in self.patches:  # not hidden
            return
        self.patches.remove(patch)
        if not self.patches:
            self._unhook()

    @contextmanager
    def lifted(self, covered: bool = False) -> Iterator[None]:
        """Inside, the owner is bare; what the host or a user has set over a patch stays, unless `covered`."""
        own, last = vars(self.owner), {patch.name: patch for patch in self.patches}
        now = {name: own[name] for name in last if name in own}
        ours = [p for p in self.patches if p.name in now and (covered or now[p.name] is last[p.name].value)]
        for patch in reversed(ours):
            patch.restore()
            if not covered and isinstance(patch.value, Around) and patch.value.users:
                setattr(self.owner, patch.name, patch.value.inner)
        self._unhook()
        try:
            yield
        finally:
            for patch in ours:
                setattr(self.owner, patch.name, now[patch.name])
            if self.patches:
                own.update(self.hooks)

    def _unhook(self) -> None:
        for name in self.hooks:
            vars(self.owner).pop(name, None)

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        with self.lifted():
            made = copy.deepcopy(self.owner, memo)
        for told in dict.fromkeys(patch.copied for patch in self.patches):
            if told is not None:
                told(made)
        return made

    def _reduce(self, protocol: Any) -> Any:
        with self.lifted():
            found = self.owner.__reduce_ex__(protocol)
            if isinstance(found, str) or len(found) < 3:
                return found
            function, arguments, state, *rest = found
            return function, arguments, self._kept(state), *rest

    def _kept(self, state: Any) -> Any:
        """The state as it is now: it may be the owner's own dictionary, into which the patches come back."""
        if isinstance(state, tuple):  # with slots beside it
            return tuple(self._kept(part) for part in state)
        return dict(state) if state is vars(self.owner) else state
