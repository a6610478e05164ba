from __future__ import annotations

import pytest
import torch
from torch import nn

from integrations.ultralytics.ema import HostAverage
from tests.ultralytics.conftest import Train, same


def test_ema_decay_can_be_set_and_turned_off(train: Train) -> None:
    off = train(accel={"ema": "off"}, name="off")
    assert all(torch.equal(off.average[n], t) for n, t in off.weights.items() if t.is_floating_point())
    assert off.report["ema"]["decay"] == "off"
    fast = train(accel={"ema": 0.5}, name="fast")
    assert fast.trainer.ema.decay(1e9) == pytest.approx(0.5)
    assert not same(fast.average, fast.weights)


def test_the_average_of_the_host_is_the_trainer_s_present_one() -> None:
    class Trainer:
        class ema:
            updates = 3
            ema = nn.Linear(1, 1)

    average = HostAverage(Trainer())
    state = average.state_dict()
    Trainer.ema.updates = 5
    average.load_state_dict(state)
    assert Trainer.ema.updates == 3
    assert set(state["shadow"]) == {"weight", "bias"}
