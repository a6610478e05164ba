"""The Trainer with `checkpointing=on`: decoders with their cache, and the host's own gradient checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.huggingface.runs import report, trainer_for

PLAIN: dict[str, Any] = {"plan": "off", "compile": "off"}


def trained(folder: Path, checkpointing: str, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    trainer, _ = trainer_for(
        "gpt2-causal", folder, 8, options={**PLAIN, "checkpointing": checkpointing}, per_device_train_batch_size=2,
        max_steps=2, **more,
    )  # fmt: skip
    trainer.model.config.use_cache = checkpointing == "on"  # with a cache attention sums in another order
    trainer.train()
    return trainer.model.state_dict(), report(folder), trainer.model


def test_a_decoder_is_checkpointed_without_its_cache_and_keeps_its_own_setting(tmp_path: Path) -> None:
    plain, _, _ = trained(tmp_path / "plain", "off")
    weights, found, model = trained(tmp_path / "run", "on")
    assert found["memory"]["checkpointing"].startswith("on: ")
    assert not any("Cache" in line for line in found["warnings"])
    assert model.config.use_cache is True
    for name, value in plain.items():
        assert torch.equal(value, weights[name]), name


def test_gradient_checkpointing_of_the_host_stays_the_hosts(tmp_path: Path) -> None:
    _, found, _ = trained(tmp_path, "on", gradient_checkpointing=True)
    assert found["memory"]["checkpointing"] == "off: the model's own gradient checkpointing is on, and stays"
    assert any("gradient checkpointing" in line for line in found["warnings"])
