"""`batches` and `training_step`: a loop that reads like a loop, is measured, and calls the user's loss once a batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from plugins.core.autotune import cost_model
from plugins.core.autotune.plan_file import PLAN_NAME
from plugins.core.plan import Plan
from plugins.errors import AccelError
from tests.core.planned import Clock, Net, by_name
from tests.core.tiny import same
from tests.loops import accelerated, data, net, off, sgd

BOTH = Plan("bf16", "channels_last")
COSTS = by_name(host=1.0, bf16=0.8, channels_last=0.7, both=0.5)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)


def loader(count=24, batch=5):
    return DataLoader(TensorDataset(*data(count)), batch)


def test_epochs_equal_the_plain_loop_with_the_tail_of_each_flushed():
    model, right = net(), net()
    accel, optimizer = accelerated(model, accumulate=2), sgd(right)
    for _ in range(2):
        for batch in accel.batches(loader()):
            loss = accel.training_step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
            assert not loss.requires_grad
    x, y = data()
    for _ in range(2):
        for k in (slice(0, 10), slice(10, 20), slice(20, 24)):
            optimizer.zero_grad()
            F.cross_entropy(right(x[k]), y[k]).backward()
            optimizer.step()
    assert accel.updates == 6
    assert off(model, right) < 1e-6


def test_a_break_leaves_the_window_open():
    model = net()
    accel = accelerated(model, accumulate=2)
    for batch in accel.batches(loader()):
        accel.training_step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
        if accel.session.report.window.micro_batches == 3:
            break
    assert accel.updates == 1
    assert accel.flush().partial


def test_a_loss_of_none_leaves_the_batch_out_and_a_weight_is_that_of_its_targets():
    model, right = net(), net()
    accel = accelerated(model, accumulate=4)
    x, y = data()
    y[:7] = -100

    def loss_of(batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]) if batch["use"] else None

    for at, use in ((0, True), (12, False), (12, True)):
        batch = {"x": x[at : at + 12], "y": y[at : at + 12], "use": use}
        accel.training_step(loss_of, batch, weight=(batch["y"] != -100).sum())
    accel.flush()
    F.cross_entropy(right(x), y).backward()
    sgd(right).step()
    assert accel.session.report.window.micro_batches == 2
    assert off(model, right) < 1e-6


@pytest.mark.parametrize(
    ("loss_of", "batch", "told"),
    [(lambda batch: 3.0, torch.ones(2, 8), "returned float"), (lambda batch: torch.ones(()), ["a"], "give weight=")],
)
def test_mistakes_are_one_line(loss_of, batch, told):
    with pytest.raises(AccelError, match=told):
        accelerated(net()).training_step(loss_of, batch)


class Timed:
    """A run whose steps take as long as COSTS says; counts what runs of the user's."""

    def __init__(self, clock, costs=COSTS, **options):
        torch.manual_seed(0)
        self.clock, self.costs, self.losses, self.forwards = clock, costs, 0, 0
        draw = torch.Generator().manual_seed(5)
        images, labels = torch.rand(28, 3, 8, 8, generator=draw), torch.randint(2, (28,), generator=draw)
        self.loader = DataLoader(TensorDataset(images, labels), 4, shuffle=True)
        self.model = Net()
        forward = self.model.forward

        def timed(x):
            self.forwards += 1
            layout = self.accel.layout
            self.clock.now += self.costs(Plan(layout.precision, layout.memory_format))
            return forward(x)

        self.model.forward = timed
        settings = {"precision": "auto", "memory_format": "auto", "compile": "off", "ema": 0.9, **options}
        self.accel = accelerated(self.model, torch.optim.AdamW(self.model.parameters(), lr=0.01), **settings)

    def loss(self, batch):
        self.losses += 1
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def run(self, epochs=2, of=150):
        self.accel.train()
        for epoch in range(epochs):
            for batch in self.accel.batches(self.loader, epochs_left=of - epoch):
                self.accel.training_step(self.loss, batch)
        return self

    def state(self):
        return self.accel.session.state_dict() | {"plan": None, "config": None, "switches": None}


def test_what_is_auto_is_measured_and_the_users_loss_runs_once_a_batch(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    measured = Timed(clock).run()
    assert measured.accel.session.tuner.plan == BOTH
    assert measured.losses == 14
    assert measured.forwards > 14
    assert measured.accel._tuning.replay.calls == []
    assert "_compiled_call_impl" not in measured.model.__dict__
    measured.accel.end(tmp_path)
    given = Timed(clock, plan=tmp_path / PLAN_NAME).run()
    assert given.forwards == 14
    assert same(given.state(), measured.state())
    assert Timed(clock).run().forwards == 14  # the same job starts with what was learnt


def test_a_short_loop_measures_nothing(monkeypatch):
    short = Timed(Clock(monkeypatch)).run(1, of=1)
    assert short.forwards == short.losses == 7
    assert short.accel.session.tuner.plan == Plan()


@pytest.mark.parametrize("at", [5, 9])
def test_a_measured_run_resumes_bit_for_bit(monkeypatch, tmp_path, at):
    clock = Clock(monkeypatch)
    batches = list(Timed(clock).loader) * 2
    straight, second = Timed(clock), Timed(clock)
    for index, batch in enumerate(straight.accel.batches(batches, epochs_left=100)):
        if index == at:
            straight.accel.save(tmp_path / "half.pt")
        straight.accel.training_step(straight.loss, batch)
    second.accel.resume(tmp_path / "half.pt")
    for batch in second.accel.batches(batches[at:], epochs_left=100):
        second.accel.training_step(second.loss, batch)
    assert second.forwards == 14 - at
    assert second.accel.session.tuner.plan == straight.accel.session.tuner.plan == BOTH
    assert same(second.state(), straight.state())


def test_a_loss_that_does_not_call_the_model_itself_is_not_measured(monkeypatch):
    run = Timed(Clock(monkeypatch))
    run.loss = lambda batch: F.cross_entropy(run.model.head(run.model.body(batch[0]).mean((2, 3))), batch[1])
    run.run()
    assert "does not call the model" in run.accel.session.tuner.outcome.reason


@pytest.mark.parametrize(
    ("hang", "name"),
    [
        (lambda m, hook: m.head.register_forward_hook(hook), "head"),
        (lambda m, hook: m.head.weight.register_hook(lambda gradient: hook()), "head.weight"),
        (lambda m, hook: m.head.bias.register_post_accumulate_grad_hook(hook), "head.bias"),
    ],
)
def test_a_hook_of_the_users_runs_as_often_as_his_loop_runs_it(monkeypatch, hang, name):
    """It may keep what it sees in a list, or step an optimizer in the backward."""
    run, seen = Timed(Clock(monkeypatch)), []
    hang(run.model, lambda *held: seen.append(1))
    run.run()
    assert len(seen) == run.forwards == 14
    assert f"{name} has a hook of the user's own" in run.accel.session.tuner.outcome.reason


def test_the_deprecated_names_work_and_are_told_once():
    model = nn.Conv2d(3, 2, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accel = accelerated(model, planned=True)
        for _ in range(3):
            x = torch.rand(2, 3, 8, 8)
            accel.plan(lambda x=x: model(accel.moved(x)).square().mean(), 5, x.shape)
            with accel.forward(x) as moved:
                loss = model(moved).square().mean()
            accel.backward(loss, weight=len(accel.moved(x)))
    names = [str(w.message).split()[1] for w in told if w.category is DeprecationWarning]
    assert names == ["planned", "plan", "moved"]
    assert accel.updates == 3
