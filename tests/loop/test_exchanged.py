"""What a hand-written loop exchanges in the middle of its run takes effect, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from plugins.errors import AccelError
from tests.loops import accelerated, data, net, off, plain, sgd


def step(accel, k=slice(None)):
    x, y = data()
    with accel.forward(x[k]) as moved:
        loss = F.cross_entropy(accel.model(moved), y[k])
    return accel.backward(loss, weight=len(y[k]))


def test_another_optimizer_and_schedule_step_from_then_on():
    model, right = net(), net()
    x, y = data()
    accel = accelerated(model, host_clip_norm=0.5, schedule=lambda steps: StepLR(steps, 1, 0.5))
    optimizer = sgd(right)
    step(accel)
    accel.optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    accel.scheduler = StepLR(accel.optimizer, 1, 0.1)
    step(accel)
    step(accel)
    for steps in (optimizer, second := torch.optim.AdamW(right.parameters(), 0.01), second):
        right.zero_grad()
        F.cross_entropy(right(x), y).backward()
        torch.nn.utils.clip_grad_norm_(right.parameters(), 0.5)
        steps.step()
        steps.param_groups[0]["lr"] *= 0.1
    assert off(model, right) < 1e-6
    assert accel.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    with pytest.raises(AccelError, match="LBFGS"):
        accel.optimizer = torch.optim.LBFGS(model.parameters())


def test_accumulation_that_grows_in_the_run_is_the_bigger_batch_from_then_on():
    model, right = net(), net()
    accel, optimizer = accelerated(model), sgd(right)
    x, y = data()
    step(accel)
    accel.accumulate = 2
    for k in (slice(0, 8), slice(8, 24)):
        step(accel, k)
    for _ in range(2):
        plain(right, optimizer, F.cross_entropy(right(x), y))
    assert accel.updates == accel.accumulate == accel.session.report.window.accumulate == 2
    assert off(model, right) < 1e-6
    step(accel)
    with pytest.raises(AccelError, match=r"accumulate=1: a window is open \(1 of 2 micro-batches\); call flush"):
        accel.accumulate = 1
    for count in (0, 1.5, True):
        with pytest.raises(AccelError, match="expected micro-batches an update"):
            accel.accumulate = count


def test_another_model_is_another_run():
    accel, model = accelerated(net()), net()
    with pytest.raises(AccelError, match="model=Sequential: a run keeps its model"):
        accel.model = model
    accel.model = kept = accel.model.float()
    assert accel.model is kept is not model
