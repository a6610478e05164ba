"""A process of its own: `mirror`, once imported, is this process's accelerator. Run by tests/test_mirror.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["ACCELERATE_TORCH_DEVICE"] = "mirror"  # read as accelerate is imported

import pytest
import torch

from tests import mirror


@pytest.fixture(autouse=True)
def _on_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, `mirror` takes factories; no accel.yaml of this folder, and a cache of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    with mirror.Mode():
        yield
