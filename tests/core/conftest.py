from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# One thread and no clock: the machines that run this are small and shared, and an example must come again.
settings.register_profile("core", max_examples=20, deadline=None, derandomize=True, database=None)
settings.load_profile("core")


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No accel.yaml of this folder, no graphs of an earlier test."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
