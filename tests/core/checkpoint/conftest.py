from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

OLD, NEW = b"old" * 1000, b"new" * 5000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "last.pt"
    found.write_bytes(OLD)
    return found


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
