"""Batches, losses and weights of every kind in a hand-written loop, beside a plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from plugins.errors import AccelError
from tests.loops import accelerated, data, net, off, plain, sgd


class Lines(IterableDataset):
    """Says its length in a way of its own, and counts how often it is asked."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __len__(self):
        self.asked += 1
        return self.length()

    def __iter__(self):
        return iter(zip(*data(), strict=True))


def refuse():
    raise NotImplementedError("a stream")


@pytest.mark.parametrize(
    ("length", "plan", "asked"), [(lambda: 24, "auto", 1), (lambda: 24, "off", 0), (refuse, "auto", 1)]
)
def test_a_loaders_length_is_asked_for_once_where_it_is_of_use_and_may_be_refused(length, plan, asked):
    model, lines = net(), Lines(length)
    accel = accelerated(model, plan=plan)
    for batch in accel.batches(DataLoader(lines, 4)):
        accel.training_step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
    assert accel.updates == 6
    assert lines.asked == asked


class Rows(list):
    """As collators of detection libraries give."""


def test_a_list_of_a_class_of_its_own_is_moved_and_counted():
    model = net()
    accel = accelerated(model)
    accel.layout.moved = lambda tensor: tensor + 0
    x, y = data()
    batch = Rows([x, y])
    for placed in accel.batches([batch]):
        assert type(placed) is Rows
        assert placed[0] is not x
        accel.training_step(lambda rows: F.cross_entropy(model(rows[0]), rows[1]), placed)
    assert batch[0] is x
    assert accel.session.series.samples == 24


def test_an_empty_last_batch_adds_nothing():
    model, right = net(), net()
    accel = accelerated(model, accumulate=3)
    x, y = data()
    for k in (slice(0, 8), slice(8, 24), slice(24, 24)):
        accel.training_step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x[k], y[k]))
    plain(right, sgd(right), F.cross_entropy(right(x), y))
    assert accel.updates == 1
    assert off(model, right) < 1e-6


def test_a_ragged_batch_is_trained_on():
    draw = torch.Generator().manual_seed(2)
    rows = [torch.randn(count, 8, generator=draw) for count in (3, 5)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model, right = nn.Linear(8, 3), nn.Linear(8, 3)
    right.load_state_dict(model.state_dict())
    accel = accelerated(model)
    for batch in accel.batches([ragged]):
        accel.training_step(lambda batch: model(batch).values().square().mean(), batch)
    plain(right, sgd(right), right(torch.cat(rows)).square().mean())
    assert off(model, right) < 1e-6


class Mixed(nn.Module):
    """Parameters of several kinds: complex, of half precision, real."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Linear(8, 6, dtype=torch.complex64)
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.narrow(self.waves(x.cfloat()).abs().bfloat16()).float())


@pytest.mark.parametrize("count", [torch.tensor, lambda n: torch.tensor([n])])
def test_parameters_of_several_kinds_and_a_count_on_the_device_equal_the_plain_loop(count):
    """The factor of a window is exact for each kind: 1/23 in bf16 is 0.2 % off."""
    model, right = Mixed(), Mixed()
    x, y = data(23)
    accel = accelerated(model, accumulate=2)
    for k in (slice(0, 8), slice(8, 23)):
        with accel.forward(x[k]) as moved:
            loss = F.cross_entropy(model(moved), y[k])
        accel.backward(loss, weight=count(len(y[k])))
    plain(right, sgd(right), F.cross_entropy(right(x), y))
    moved = (right.head.weight - Mixed().head.weight).norm()
    assert (model.head.weight - right.head.weight).norm() < 1e-5 * moved
    assert (model.waves.weight - right.waves.weight).norm() < 1e-2 * moved


@pytest.mark.parametrize(
    ("loss", "weight", "told"),
    [
        (torch.ones(4), 4, r"a loss of shape \[4\]: expected one number"),
        ({"loss": torch.ones(())}, 4, "the loss is dict: expected a tensor with one number"),
        (3.0, 4, "the loss is float"),
        ((torch.ones(()), torch.ones(4, 3)), 4, "the loss is tuple"),
        (torch.ones(()), torch.ones(4), r"weight of shape \[4\]: expected one count"),
    ],
)
def test_what_is_no_loss_or_no_count_is_one_line(loss, weight, told):
    with pytest.raises(AccelError, match=told):
        accelerated(net()).backward(loss, weight=weight)


def test_a_batch_whose_loss_fails_is_left_out_and_the_window_stays():
    """As in a plain loop that catches the error and goes on: BatchNorm with one sample, a damaged picture."""
    model, right = net(), net()
    accel = accelerated(model, accumulate=2)
    x, y = data()

    def loss_of(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if len(batch[0]) == 1:
            raise ValueError("expected more than 1 value per channel")
        return loss

    for k in (slice(0, 8), slice(8, 9), slice(8, 24)):
        if k.stop - k.start == 1:
            with pytest.raises(ValueError, match="more than 1 value"):
                accel.training_step(loss_of, (x[k], y[k]))
        else:
            accel.training_step(loss_of, (x[k], y[k]))
    plain(right, sgd(right), F.cross_entropy(right(x), y))
    window = accel.session.report.window
    assert (accel.updates, window.micro_batches, window.dropped_micro_batches) == (1, 2, 0)
    assert off(model, right) < 1e-6
