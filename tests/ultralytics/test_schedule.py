"""Sizes and rates counted in updates, against the host's own loop written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ultralytics.engine.trainer import BaseTrainer

from integrations.contract import UnsupportedRun
from integrations.ultralytics import schedule
from plugins.config import AccelConfig


def trainer(batches: int = 8, epochs: int = 5, warmup: float = 3.0, nbs: int = 64, lr: float = 0.01) -> Any:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [
        {"params": [w], "param_group": n, "weight_decay": 0.0 if n != "weight" else 0.1}
        for w, n in zip(weights, ("bias", "weight", "bn"), strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    found = SimpleNamespace(
        args=SimpleNamespace(
            warmup_epochs=warmup,
            warmup_bias_lr=0.1,
            warmup_momentum=0.8,
            momentum=0.9,
            weight_decay=0.0005,
            nbs=nbs,
        ),
        batch_size=4,
        epochs=epochs,
        epoch=0,
        train_loader=range(batches),
        optimizer=optimizer,
        lf=lambda epoch: 1 - epoch / 10,
    )
    found._get_warmup_iterations = lambda n: BaseTrainer._get_warmup_iterations(found, n)
    found.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, found.lf)
    return found


@pytest.mark.parametrize(
    ("options", "batch", "size"),
    [
        ({}, 4, None),
        ({"accumulate": 1}, 4, 1),
        ({"accumulate": 6}, 4, 6),
        ({"effective_batch": 4}, 4, 1),
        ({"effective_batch": 24}, 4, 6),
    ],
)
def test_window_size(options: dict[str, Any], batch: int, size: int | None) -> None:
    assert schedule.window_size(AccelConfig(**options), batch) == size


def test_an_effective_batch_has_to_be_a_multiple() -> None:
    with pytest.raises(
        UnsupportedRun, match=r"effective_batch=10: not a multiple of batch=4; allowed are 4, 8, \.\.\."
    ):
        schedule.window_size(AccelConfig(effective_batch=10), 4)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"effective_batch": 24}, 12), ({"effective_batch": 5}, 3), ({"accumulate": 6}, 6), ({}, None)],
)
def test_after_a_halved_batch_the_effective_batch_is_kept(options: dict[str, Any], size: int | None) -> None:
    assert schedule.window_size(AccelConfig(**options), 2, rounded=True) == size


def test_weight_decay_follows_the_effective_batch() -> None:
    found = trainer()
    schedule.set_weight_decay(found, 16)
    decays = {g["param_group"]: g["weight_decay"] for g in found.optimizer.param_groups}
    assert decays == {"weight": 0.0005 * 16 / 64, "bias": 0.0, "bn": 0.0}


@given(
    batches=st.integers(1, 30),
    epochs=st.integers(1, 6),
    warmup=st.sampled_from([0.0, 0.5, 1.0, 2.7, 3.0]),
    nominal=st.integers(1, 20),
)
def test_the_host_s_windows_are_the_host_s(batches: int, epochs: int, warmup: float, nominal: int) -> None:
    """Against the lines of the host's loop that ramp `accumulate`."""
    found = trainer(batches, epochs, warmup)
    nw = found._get_warmup_iterations(batches)
    accumulate = nominal
    for epoch in range(epochs):
        found.epoch = epoch
        for i in range(batches):
            ni = i + batches * epoch
            if nw and ni <= nw:
                accumulate = max(1, int(np.interp(ni, [0, nw], [1, nominal]).round()))
            assert schedule.host_window(found, i, nominal) == accumulate


@given(batches=st.integers(1, 20), size=st.integers(1, 6), epochs=st.integers(2, 5), warmup=st.sampled_from([1.0, 3.0]))
def test_warm_up_is_the_one_of_a_run_on_big_batches(batches: int, size: int, epochs: int, warmup: float) -> None:
    """`batches * size` micro-batches an epoch, K = `size`, against the host's loop over `batches` big ones."""
    ours, big = trainer(batches * size, epochs, warmup), trainer(batches, epochs, warmup)
    nw = big._get_warmup_iterations(batches)
    for update in range(epochs * batches):
        ours.epoch = big.epoch = update // batches
        for found in (ours, big):
            for group in found.optimizer.param_groups:
                group["lr"], group["momentum"] = 0.01 * found.lf(found.epoch), 0.9
        if nw and update <= nw:
            for group in big.optimizer.param_groups:
                start = 0.1 if group["param_group"] == "bias" else 0.0
                group["lr"] = float(np.interp(update, [0, nw], [start, group["initial_lr"] * big.lf(big.epoch)]))
                group["momentum"] = float(np.interp(update, [0, nw], [0.8, 0.9]))
        schedule.warm_up(ours, update, len(ours.train_loader) / size)
        for a, b in zip(ours.optimizer.param_groups, big.optimizer.param_groups, strict=True):
            assert (a["lr"], a["momentum"]) == pytest.approx((b["lr"], b["momentum"]), rel=1e-12)


@pytest.mark.parametrize(("rule", "factor"), [("off", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_s_scale(rule: str, factor: float) -> None:
    found = trainer()
    schedule.scale_learning_rate(found, rule, 4.0)
    assert found.scheduler.base_lrs == pytest.approx([0.01 * factor] * 3)
    assert [g["initial_lr"] for g in found.optimizer.param_groups] == pytest.approx([0.01 * factor] * 3)
