"""Training mode of a hand-written loop: what a loop has set stays set, and what the settings hold is held."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.loops import accelerated, data, off


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def step(accel, k=slice(None)):
    x, y = data()
    with accel.forward(x[k]) as moved:
        loss = F.cross_entropy(accel.model(moved), y[k])
    accel.backward(loss, weight=len(y[k]))


@pytest.mark.parametrize("ema", ["off", 0.5])
def test_validation_puts_every_modules_mode_back(ema):
    accel = accelerated(norms(), ema=ema)
    accel.model[1].eval()  # a frozen part of a network that is fine-tuned
    step(accel)
    with accel.validation() as model:
        assert not any(module.training for module in model.modules())
    assert [module.training for module in accel.model] == [True, False, True, True]
    accel.model.eval()
    with accel.validation():
        pass
    assert not any(module.training for module in accel.model.modules())


class Merging(nn.Linear):
    """As LoRA's layers: `eval` merges, `train` takes out again."""

    def __init__(self):
        super().__init__(8, 3)
        self.low = nn.Parameter(torch.full((3, 8), 0.1))
        self.merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += -self.low.data if mode else self.low.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return F.linear(x, self.weight if self.merged else self.weight + self.low, self.bias)


def test_a_layer_that_merges_its_weights_in_eval_mode_keeps_them_apart_from_the_average():
    torch.manual_seed(0)
    validated, right = accelerated(Merging(), ema=0.5), None
    torch.manual_seed(0)
    right = accelerated(Merging(), ema=0.5)
    for _ in range(3):
        step(validated)
        step(right)
        with validated.validation():
            pass
    assert off(validated.model, right.model) < 1e-6
    ours, theirs = validated.weights(), right.weights()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)


def test_frozen_statistics_stay_so_where_the_loop_sets_training_mode_itself():
    accel = accelerated(norms(), batchnorm="freeze")
    before = accel.model[1].running_mean.clone()
    for _ in range(2):
        accel.model.train()
        step(accel)
    assert torch.equal(accel.model[1].running_mean, before)


def test_a_cell_that_is_run_again_scales_momentum_once():
    model = norms()
    for _ in range(3):  # a notebook's cell, which ends no run
        accel = accelerated(model, batchnorm="momentum", accumulate=4)
    assert model[1].momentum == pytest.approx(1 - 0.9**0.25)
    accel.end()
    assert model[1].momentum == 0.1


def test_momentum_that_the_user_sets_between_two_runs_is_the_one_in_force():
    model = norms()
    accelerated(model, batchnorm="momentum", accumulate=4)  # no end
    model[1].momentum = 0.3
    accel = accelerated(model, batchnorm="momentum", accumulate=2)
    assert model[1].momentum == pytest.approx(1 - 0.7**0.5)
    accel.end()
    assert model[1].momentum == 0.3
