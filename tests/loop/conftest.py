from __future__ import annotations

import pytest

from plugins.core.autotune import cost_model
from tests.core.planned import Clock


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    """What a run measured is remembered for that test alone, and bf16 is worth a trial."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)
