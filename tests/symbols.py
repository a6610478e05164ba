"""Which names of a host an integration's source takes: to check its table of symbols against."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from integrations.versions import Symbol

ROOT = Path(__file__).parents[1] / "integrations"
PATCHING = {"put", "method", "value"}


def taken(room: str, hosts: set[str]) -> Iterator[str]:
    """Names that the files of `integrations/room` import from the host, or patch on its objects."""
    for path in sorted((ROOT / room).rglob("*.py")):
        if path.stem == "versions":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in hosts:
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in PATCHING:
                yield from (a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def named(table: Sequence[Symbol]) -> set[str]:
    """Every name in a table's paths."""
    return {name for symbol in table for name in re.split(r"[:.()\[\]]", symbol.path) if name}
