from __future__ import annotations

import pytest
import torch

from integrations.easyocr.optimizer import optimizer, schedule
from integrations.easyocr.settings import read_settings


def rates(**options):
    """The learning rate of each update."""
    settings, _ = read_settings({"num_iter": 20, **options})
    steps = optimizer([torch.nn.Parameter(torch.zeros(1))], settings)
    make, found = schedule(settings), []
    scheduler = make(steps) if make else None
    for _ in range(20):
        found.append(steps.param_groups[0]["lr"])
        steps.step()
        if scheduler:
            scheduler.step()
    return found


def test_every_optimizer_takes_the_learning_rate():
    for name, kind in ((False, torch.optim.Adadelta), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        settings, _ = read_settings({"optim": name, "lr": 0.25})
        frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        steps = optimizer([torch.nn.Parameter(torch.zeros(1)), frozen], settings)
        assert type(steps) is kind
        assert steps.param_groups[0]["lr"] == 0.25
        assert len(steps.param_groups[0]["params"]) == 1


def test_schedules_count_updates():
    assert rates(lr=2.0) == [2.0] * 20
    warmed = rates(lr=2.0, warmup=4)
    assert warmed[0] == pytest.approx(0.4)
    assert warmed[4:] == [2.0] * 16
    cosine = rates(lr=1.0, warmup=4, schedule="cosine")
    assert max(cosine) == cosine[4] == 1.0
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    assert cosine[-1] < 0.02


def test_one_cycle_is_torchs():
    ours = rates(lr=1.0, warmup=5, schedule="onecycle")
    steps = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(steps, 1.0, 20, pct_start=0.3, cycle_momentum=False)  # 0.3 * 20 - 1
    for rate in ours:
        assert rate == pytest.approx(steps.param_groups[0]["lr"], abs=1e-9)
        steps.step()
        if theirs.last_epoch < 19:
            theirs.step()
