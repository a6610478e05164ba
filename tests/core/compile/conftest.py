from __future__ import annotations

from pathlib import Path

import pytest

from plugins.core.autotune import background_compile, cost_model
from plugins.core.autotune.plan_cache import INDUCTOR
from tests.core.compile.stand_ins import fusable, new_host
from tests.core.planned import Clock, Host


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """A loop of a model that may be compiled, in 1.0 s a step eagerly and 0.5 s compiled, of 1,000 updates."""
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    monkeypatch.setattr(background_compile, "fusable_share", fusable)
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: True)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "inductor"))
    return new_host(Clock(monkeypatch))
