from __future__ import annotations

from typing import Any

import pytest
import torch

from plugins.core.autotune import plan_cache
from plugins.core.autotune.plan_cache import fingerprint
from tests.core.tiny import CPU, Mlp, Net, mlp


def test_other_work_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: Any, shape: tuple[int, ...] = (4, 3), settings: Any = ("auto",)) -> str:
        return fingerprint(model, shape, CPU, settings)

    one = of(mlp())
    assert of(mlp(seed=1)) == one  # weights do not matter
    frozen = mlp()
    frozen.first.weight.requires_grad_(False)
    others = [of(Mlp(norm=True)), of(Net()), of(mlp(dtype=torch.float64)), of(frozen), of(mlp(), (8, 3))]
    others.append(of(mlp(), settings=("off",)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(of(mlp()))
    monkeypatch.undo()
    for module, name, value in (
        (torch, "__version__", "9.9.9"),
        (plan_cache, "SCHEMA", 99),
        (plan_cache, "bf16_is_fast", lambda device: "another"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    ):
        monkeypatch.setattr(module, name, value)
        others.append(of(mlp()))
        monkeypatch.undo()
    assert len({one, *others}) == 1 + len(others)
