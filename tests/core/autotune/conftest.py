from __future__ import annotations

import pytest

from plugins.core.autotune import cost_model
from tests.core.planned import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    return Clock(monkeypatch)
