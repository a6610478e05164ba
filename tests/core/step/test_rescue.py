"""A window that is done again: what is put back, what is held, and when there is no way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from plugins.core.step.rescue import OutOfMemory
from tests.core.tiny import session_of
from tests.short import TOLD


def made(accumulate=2, samples=8, model=None):
    model = model or nn.Linear(4, 2)
    session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate)
    session.describe_window(samples)
    return session, model


def fails():
    raise torch.OutOfMemoryError(TOLD)


def test_every_batch_of_the_window_is_done_again_from_its_own_random_state():
    session, _ = made()
    drawn = []

    def step():
        drawn.append(float(torch.rand(())))

    for last in (False, True):
        torch.rand(3)  # the loader's
        session.rescue.note(step, 8)
        session.micro_batch(8)
        if not last:
            session.rescue.guarded(step)
    session.rescue.guarded(fails)
    assert drawn[1] == drawn[0] != drawn[2]
    assert session.rescue.limit == 4
    assert session.report.window.micro_batches == 2


def test_a_step_that_still_does_not_fit_is_halved_again_and_again():
    session, _ = made(samples=7)
    tried = []

    def step():
        tried.append(session.rescue.limit)
        if session.rescue.limit > 1:
            fails()
        return "done"

    session.rescue.note(step, 7)
    assert session.rescue.guarded(fails) == "done"
    assert tried == [4, 2, 1]
    facts = session.report
    assert (facts.window.accumulate, facts.window.micro_batch, facts.window.effective_batch) == (14, 1, 14)
    assert facts.memory.out_of_memory == {"count": 3, "update": 0, "micro_batch": 1}


def test_gradients_and_statistics_are_those_of_before_the_window():
    session, model = made(model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = model[1].running_mean.clone()
    session.arrived()

    def step():
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(model[1].running_mean, before)

    session.rescue.note(step, 8)
    session.count(8)
    model(torch.randn(8, 4)).sum().backward()
    session.rescue.guarded(fails)


def test_no_way_out_drops_the_window_and_saves():
    session, model = made()
    session.rescue.held_by(again=lambda: None, keep=lambda: "saved in x")
    session.rescue.note(lambda: None, 8, lambda: "a packed batch")
    session.micro_batch(8)
    model(torch.randn(8, 4)).sum().backward()
    with pytest.raises(OutOfMemory, match=r"micro-batch of 8, .* \(a packed batch\); .* before, saved in x"):
        session.rescue.guarded(fails)
    assert session.window.empty
    assert session.report.window.dropped_micro_batches == 1
    assert all(p.grad is None for p in model.parameters())


def test_without_a_noted_batch_the_error_is_the_host_s():
    session, _ = made()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        session.rescue.guarded(fails)
    assert not isinstance(caught.value, OutOfMemory)


def test_what_the_failed_forward_held_is_gone_before_the_window_is_done_again():
    session, model = made()
    held = []

    def forward():
        activation = model(torch.randn(8, 4))
        held.append(weakref.ref(activation))
        fails()

    session.rescue.note(lambda: held[0]() is None, 8)
    assert session.rescue.guarded(forward)


def test_batches_are_held_until_the_window_closes_and_no_longer():
    session, model = made(accumulate=1)
    batch = torch.randn(8, 4)
    there = weakref.ref(batch)
    session.rescue.note(lambda batch=batch: None, 8)
    session.micro_batch(8)
    (model(batch).sum() * session.mean(8)).backward()
    del batch
    assert there() is not None
    session.backward_done()
    gc.collect()
    assert there() is None
