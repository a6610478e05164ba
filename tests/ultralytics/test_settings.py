from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ultralytics.conftest import BATCHNORM, Train, same, tensors


def test_batchnorm_momentum_keeps_the_time_constant_of_an_update(train: Train) -> None:
    seen: list[float] = []

    def note(trainer: Any) -> None:
        seen.append(next(m.momentum for m in trainer.model.modules() if isinstance(m, BATCHNORM)))

    run = train(accel={"accumulate": 4, "batchnorm": "momentum"}, callbacks={"on_train_batch_end": note})
    assert seen == [pytest.approx(1 - 0.97**0.25)] * 4
    assert {m.momentum for m in run.trainer.model.modules() if isinstance(m, BATCHNORM)} == {0.03}  # undone
    assert run.report["batchnorm"]["rule"] == "momentum"


def test_batchnorm_freeze_holds_statistics_while_weights_move(train: Train) -> None:
    before: dict[str, Any] = {}
    run = train(
        accel={"batchnorm": "freeze"},
        callbacks={"on_train_start": lambda t: before.update(tensors(t.model))},
        epochs=2,
        val=True,
    )
    after = run.weights
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    assert moved
    assert not any("running" in n or "num_batches" in n for n in moved)


@pytest.mark.parametrize(("batch", "rule", "warned"), [(4, "host", 1), (8, "host", 0), (4, "freeze", 0)])
def test_one_warning_about_small_micro_batches(batch: int, rule: str, warned: int, train: Train) -> None:
    run = train(accel={"batchnorm": rule}, batch=batch, epochs=2)
    assert sum("under 8" in w for w in run.report["warnings"]) == warned
    assert run.report["batchnorm"]["micro_batch_too_small"] is bool(warned)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2**0.5)])
def test_lr_scale_follows_the_effective_batch(rule: str, factor: float, train: Train) -> None:
    run = train(accel={"accumulate": 8, "lr_scale": rule}, nbs=16, lr0=0.01, images=32)  # the host's own K is 4
    assert run.spy.updates[0].rates == pytest.approx([0.01 * factor] * 3)


def test_seed_and_memory_format(train: Train) -> None:
    runs = [
        train(accel={"seed": seed, "memory_format": "channels_last"}, name=f"run{i}", mosaic=1.0)
        for i, seed in enumerate((1, 1, 2))
    ]
    assert same(runs[0].weights, runs[1].weights)
    assert not same(runs[0].weights, runs[2].weights)
    assert runs[0].report["speed"]["memory_format"] == "channels_last"


def test_bf16_runs_the_forward_in_bf16_and_keeps_fp32_weights(train: Train) -> None:
    seen: list[torch.dtype] = []

    def monitor(trainer: Any) -> None:
        def hook(module: nn.Module, _: Any, output: torch.Tensor) -> None:
            if module.training:
                seen.append(output.dtype)

        trainer.model.model[0].conv.register_forward_hook(hook)

    run = train(accel={"precision": "bf16", "accumulate": 2}, callbacks={"on_pretrain_routine_end": monitor})
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in run.trainer.model.parameters()} == {torch.float32}
    assert run.report["speed"]["precision"] == "bf16"
