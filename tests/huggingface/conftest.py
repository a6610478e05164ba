from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Machines that run this are small and shared: one thread, no trial and no compile worker but in the tests of them.
os.environ.update(HF_HUB_OFFLINE="1", ACCEL_PLAN="off", ACCEL_CACHE_DIR=tempfile.mkdtemp(prefix="accel-cache-"))


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No accel.yaml of this folder."""
    monkeypatch.chdir(tmp_path)
