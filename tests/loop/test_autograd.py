"""Losses that use autograd in their own way, in windows of a hand-written loop and in a plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.loops import accelerated, data, net, off, plain, sgd


def _gradient_penalty(model, x, y):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + slope.norm(dim=1).square().mean()


def _checkpointed(model, x, y):
    return F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)


def _teacher(model, x, y):
    with torch.no_grad():
        target = model(x + 0.1)
    return F.cross_entropy(model(x), y) + (model(x) - target).square().mean()


@pytest.mark.parametrize("loss_of", [_gradient_penalty, _checkpointed, _teacher])
def test_losses_that_use_autograd_in_their_own_way_equal_the_plain_loop(loss_of):
    model, right = net(), net()
    x, y = data()
    accel, optimizer = accelerated(model, accumulate=2, clip_norm=0.5), sgd(right)
    for _ in range(2):
        for k in (slice(0, 8), slice(8, 24)):
            with accel.forward(x[k]) as moved:
                loss = loss_of(model, moved, y[k])
            accel.backward(loss, weight=len(y[k]))
        optimizer.zero_grad()
        loss_of(right, x, y).backward()
        nn.utils.clip_grad_norm_(right.parameters(), 0.5)
        optimizer.step()
    assert off(model, right) < 1e-6


def test_sparse_gradients_equal_the_plain_loop():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))

    model, right = make(), make()
    words, y = torch.randint(0, 20, (24, 3)), data()[1]
    plain_sgd = torch.optim.SGD(right.parameters(), lr=0.1)
    accel = accelerated(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2, clip_norm=0.1)
    for k in (slice(0, 8), slice(8, 24)):
        with accel.forward(words[k]) as moved:
            loss = F.cross_entropy(model(moved), y[k])
        accel.backward(loss, weight=len(y[k]))
    F.cross_entropy(right(words), y).backward()
    right[0].weight.grad = right[0].weight.grad.coalesce()
    dense = [right[0].weight.grad.values(), *(p.grad for p in right[2].parameters())]
    norm = torch.stack([g.norm() for g in dense]).norm()
    for gradient in dense:
        gradient.mul_(0.1 / norm)
    plain_sgd.step()
    assert off(model, right) < 1e-6


def test_truncated_backpropagation_with_a_carried_state_equals_the_plain_loop():
    def make():
        torch.manual_seed(0)
        return nn.GRU(4, 6)

    model, right = make(), make()
    text = torch.randn(20, 3, 4)
    accel, optimizer = accelerated(model), sgd(right)
    ours = theirs = None
    for at in range(0, 20, 5):
        with accel.forward(text[at : at + 5]) as moved:
            out, ours = model(moved, ours)
            loss = out.square().mean()
        ours = ours.detach()
        accel.backward(loss, weight=15)
        out, theirs = right(text[at : at + 5], theirs)
        theirs = theirs.detach()
        plain(right, optimizer, out.square().mean())
    assert off(model, right) < 1e-6
