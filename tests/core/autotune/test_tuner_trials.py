from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plugins.core.autotune.plan_file import Switch, write_switches
from plugins.core.plan import Plan
from tests.core.planned import BOTH_WIN, OF, UPDATES, Clock, Host, Net, by_name, names
from tests.core.tiny import same, snapshot


def state_of(host: Host) -> dict[str, Any]:
    held = host.open
    return {
        "model": snapshot(host.model),
        "strides": {n: p.stride() for n, p in host.model.named_parameters()},
        "gradients": [p.grad for p in host.model.parameters()],
        "optimizer": copy.deepcopy(host.optimizer.state_dict()),
        "window": copy.deepcopy(held.window.state_dict()),
        "kept": [t.clone() for t in held.statistics._kept],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "counts": held.recorder.state_dict(),
        "training": [m.training for m in host.model.modules()],
    }


@pytest.mark.parametrize("wins", [True, False])
def test_a_trial_puts_everything_back_bit_for_bit(clock: Clock, wins: bool) -> None:
    host = Host(clock, by_name(**BOTH_WIN) if wins else by_name())
    held = host.run(4, end=False)
    host.x = torch.rand(host.shape)
    held.micro_batch(len(host.x))
    before = state_of(host)
    held.plan_window(host, OF, host.x.shape)
    assert names(host)[:2] == ["host", "bf16 + channels_last"]
    after = state_of(host)
    if wins:
        assert before.pop("strides") != after.pop("strides")
    for part, value in before.items():
        assert same(value, after[part]), part


class Moving(Net):
    """Buffers that a forward moves, in place and by putting another tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.utils.parametrizations.spectral_norm(self.head)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.last = x.detach().mean()
        return super().forward(x)


def test_a_trial_that_loses_leaves_every_buffer_as_it_was(clock: Clock) -> None:
    tried, plain = Host(clock, by_name(), Moving), Host(clock, by_name(), Moving)
    tried.run(UPDATES)
    plain.run(UPDATES, plan="off", precision="host")
    assert tried.losses > plain.losses == tried.model.seen
    assert same(snapshot(tried.model), snapshot(plain.model))


@pytest.mark.parametrize("keep", [True, False])
def test_a_trial_leaves_no_gradient_on_a_criterions_parameters(clock: Clock, keep: bool) -> None:
    """The next update would add to it: the optimizer holds them, the model does not."""
    host = Host(clock, by_name())
    own = torch.nn.Parameter(torch.ones(()))
    host.optimizer.add_param_group({"params": [own]})
    held = host.session()
    held.update.keep_gradients = lambda: keep
    with held.guard.untouched():
        own.square().backward()
    assert (own.grad == 0) if keep else own.grad is None
    held.end()


def test_two_runs_of_a_seed_give_the_same_weights(clock: Clock) -> None:
    first, second = (Host(clock, by_name(**BOTH_WIN)) for _ in range(2))
    for host in (first, second):
        host.run(UPDATES)
    assert first.open.tuner.switches
    assert same(snapshot(first.model), snapshot(second.model))


def test_two_switches_of_one_update_are_both_made_there(clock: Clock, tmp_path: Path) -> None:
    switches = [Switch(3, Plan("bf16")), Switch(3, Plan("bf16", "channels_last")), Switch(5, Plan())]
    file = write_switches(tmp_path, Plan(), switches)
    seen: list[Plan] = []
    host = Host(clock, by_name())
    tuner = host.run(UPDATES, plan=file, each=lambda update: seen.append(host.plan)).tuner
    assert tuner.switches == switches
    assert seen[1:] == [Plan()] * 3 + [Plan("bf16", "channels_last")] * 2 + [Plan()] * 4


def test_a_trial_that_loses_leaves_the_run_as_it_was(clock: Clock) -> None:
    tried, plain = Host(clock, by_name()), Host(clock, by_name())
    tried.run(UPDATES)
    plain.run(UPDATES, plan="off", precision="host")
    assert tried.losses > plain.losses
    assert same(snapshot(tried.model), snapshot(plain.model))
