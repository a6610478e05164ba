"""For every test: the environment that a test or a host changed is put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Transformers 4.52 sets ACCELERATE_DYNAMO_BACKEND for a torch_compile=True, and every later Trainer compiles."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No accel.yaml of this folder."""
    monkeypatch.chdir(tmp_path)
