"""How files are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

Writer = Callable[[Path, Callable[[BinaryIO], Any]], Any]
"""`writer(path, fill)` calls `fill(file)` and leaves the old file or the new one, never a part."""
