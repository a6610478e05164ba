"""What of a host the plugs touch, asked of the host itself: a table a host, in `integrations/HOST/versions.py`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_PATH = re.compile(r"(?P<module>[\w.]+):(?P<names>[\w.]*)(?:\((?P<inner>\w+)\)|\[(?P<key>\w+)\])?")


@dataclass(frozen=True)
class Symbol:
    """Something of a host.

    Attributes:
        path: `module:Class.name`, also of an attribute that the class's own methods set; `module:function(name)`, a
            parameter or local variable; `module:table[key]`.
        since: the first release seen to have it, where the plug does without.
        without: what is done where it is missing; empty where the plug cannot do without.
    """

    path: str
    since: str = ""
    without: str = ""

    @cached_property
    def here(self) -> bool:
        """Whether the installed host has it."""
        match = _PATH.fullmatch(self.path)
        if match is None:
            raise ValueError(f"{self.path}: expected module:names, with (local) or [key]")
        try:
            found: Any = importlib.import_module(match["module"])
        except ModuleNotFoundError:
            return False
        for name in filter(None, match["names"].split(".")):
            if not hasattr(found, name):
                return isinstance(found, type) and _sets(found, name)
            found = getattr(found, name)
        if match["inner"]:
            return _has_variable(found, match["inner"])
        return match["key"] is None or match["key"] in found


def missing(table: Sequence[Symbol]) -> list[str]:
    """Paths that the plug cannot do without and the installed host lacks."""
    return [symbol.path for symbol in table if not symbol.without and not symbol.here]


def _sets(owner: type, name: str) -> bool:
    """Whether a method of the class or of its bases assigns `self.name`, or declares it."""
    lines = re.compile(rf"^\s+(self\.)?{name}\b\s*(:[^=\n]+)?(=|,|$)|\bself\.{name}\b(,[^=\n]+)? = ", re.MULTILINE)
    return any(lines.search(inspect.getsource(cls)) for cls in owner.__mro__ if cls is not object)


def _has_variable(function: Any, name: str) -> bool:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or function.__init__.__code__
    return name in code.co_varnames
