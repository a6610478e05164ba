from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the hub's library is imported


@pytest.fixture(scope="package", autouse=True)
def _small_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Small and shared machines run this: no trial and no compile worker but in the tests of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCEL_PLAN", "off")
        patch.setenv("ACCEL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No accel.yaml of this folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fresh() -> None:
    """No graphs of an earlier test."""
    torch._dynamo.reset()
