"""What a hand-written loop is given, resumed: optimizers of every kind, and what a file cannot hold, said in time."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from plugins.errors import AccelError
from tests.loops import accelerated, data, net, off


def step(accel):
    x, y = data()
    with accel.forward(x) as moved:
        loss = F.cross_entropy(accel.model(moved), y)
    accel.backward(loss, weight=len(y))


class Whitened(torch.optim.Optimizer):
    """As Shampoo: its state has another shape than the parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            flat = p.grad.reshape(len(p), -1)
            held = self.state[p].setdefault("gram", torch.eye(len(p)))
            held += flat @ flat.T
            p.sub_(torch.linalg.solve(held, flat).view_as(p), alpha=0.1)


class Both:
    """Two optimizers of one model, as Muon needs another one for biases: its state has a form of its own."""

    def __init__(self, model):
        self.held = [torch.optim.Adam(model[0].parameters(), 0.01), torch.optim.SGD(model[2].parameters(), 0.1, 0.9)]

    @property
    def param_groups(self):
        return [group for held in self.held for group in held.param_groups]

    def step(self, closure=None):
        for held in self.held:
            held.step()

    def zero_grad(self, set_to_none=True):
        for held in self.held:
            held.zero_grad(set_to_none)

    def state_dict(self):
        return {"held": [held.state_dict() for held in self.held]}

    def load_state_dict(self, state):
        for held, saved in zip(self.held, state["held"], strict=True):
            held.load_state_dict(saved)


class Listed(Both):
    def state_dict(self):
        return super().state_dict()["held"]

    def load_state_dict(self, state):
        super().load_state_dict({"held": state})


@pytest.mark.parametrize(
    "optimizer", [lambda m: torch.optim.Adafactor(m.parameters()), lambda m: Whitened(m.parameters()), Both, Listed]
)
def test_an_optimizer_whose_state_has_a_form_of_its_own_resumes_bit_for_bit(tmp_path, optimizer):
    first, second = (accelerated(model, optimizer(model)) for model in (net(), net(5)))
    step(first)
    path = first.save(tmp_path / "last.pt")
    second.resume(path)
    step(first)
    step(second)
    assert off(first.model, second.model) == 0
    narrow = net()[:1]
    with pytest.raises(AccelError, match="of another model"):
        accelerated(narrow, torch.optim.SGD(narrow.parameters(), 0.1)).resume(path)


def test_a_state_of_its_own_form_of_other_parameters_is_refused(tmp_path):
    first, second = (accelerated(model, Both(model)) for model in (net(), net()))
    step(first)
    second.optimizer.held[0].param_groups[0]["params"].pop()
    with pytest.raises(AccelError, match="another optimizer than Both: 4 parameters there, 3 here"):
        second.resume(first.save(tmp_path / "last.pt"))


class Seen(torch.nn.Module):
    """Its buffer grows, and makes room for itself as it is loaded, as observers of a quantisation do."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros(0, 8))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x[:1]])
        return self.net(x)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.seen = torch.empty_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_buffer_that_grows_is_saved_and_resumed(tmp_path):
    first, second = (accelerated(Seen(), ema=0.9) for _ in range(2))
    step(first)
    step(first)
    second.resume(first.save(tmp_path / "last.pt"))
    for accel in (first, second):
        step(accel)
    assert off(first.model, second.model) == 0
    assert torch.equal(first.model.seen, second.model.seen)
    assert len(second.weights()["seen"]) == 3


class Remembers(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["last"] = deque([1.0], maxlen=3)


class Decay:
    def __init__(self):
        self.file = Path("rates.txt")

    def __call__(self, update):
        return 0.9**update


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": lambda m: Remembers(m.parameters(), 0.1)}, "save: the run's state of optimizer holds deque"),
        (
            {"schedule": lambda steps: torch.optim.lr_scheduler.LambdaLR(steps, Decay())},
            "save: the run's state of scheduler holds .*Path",
        ),
    ],
)
def test_a_state_that_could_not_be_read_back_is_not_written_over_a_good_file(tmp_path, given, told):
    model = net()
    optimizer = given.pop("optimizer", lambda m: torch.optim.SGD(m.parameters(), 0.1))
    accel = accelerated(model, optimizer(model), **given)
    step(accel)
    (tmp_path / "last.pt").write_bytes(b"good")
    with pytest.raises(AccelError, match=told):
        accel.save(tmp_path / "last.pt")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"good"]


def test_numbers_of_numpy_are_numbers(tmp_path):
    path = accelerated(net()).save(tmp_path / "last.pt", best=np.float64(0.5), of=[np.int64(3)])
    assert accelerated(net()).resume(path) == {"best": 0.5, "of": [3]}
