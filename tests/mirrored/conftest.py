"""A process of its own: `mirror`, once imported, is this process's accelerator. Run by tests/test_mirror.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_TORCH_DEVICE"] = "mirror"  # read as accelerate is imported

import pytest
import torch

from tests import mirror


def _no_grad(mode: Any = True) -> Any:
    """In the place of torch.inference_mode, which wrapped tensors do not know."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else nullcontext()


torch.inference_mode = _no_grad  # before hosts decorate with it


@pytest.fixture(autouse=True)
def _on_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, `mirror` takes factories; no accel.yaml of this folder, and a cache of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    with mirror.Mode():
        yield
