"""Windows of a hand-written loop: whose gradients they hold, and which micro-batches they count, beside plain loops."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.loops import accelerated, data, net, off, plain, sgd


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gan_generator_gradients_are_no_part_of_the_discriminators_update(accumulate):
    def nets():
        torch.manual_seed(0)
        return nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    (ours_g, ours_d), (g, d) = nets(), nets()
    z, x = torch.randn(6, 12, 4), torch.randn(6, 12, 8)
    gen = accelerated(ours_g, accumulate=accumulate)
    dis = accelerated(ours_d, accumulate=accumulate)
    of_g, of_d = sgd(g), sgd(d)
    for noise, real in zip(z, x, strict=True):
        with dis.forward(real, noise) as (real_in, noise_in):
            loss = F.softplus(-ours_d(real_in)).mean() + F.softplus(ours_d(ours_g(noise_in).detach())).mean()
        dis.backward(loss, weight=12)
        with gen.forward(noise) as noise_in:
            loss = F.softplus(-ours_d(ours_g(noise_in))).mean()
        gen.backward(loss, weight=12)
    for at in range(0, 6, accumulate):
        noise, real = z[at : at + accumulate].flatten(0, 1), x[at : at + accumulate].flatten(0, 1)
        before = copy.deepcopy((g, d)) if accumulate > 1 else None
        plain(d, of_d, F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean())
        if before is None:
            plain(g, of_g, F.softplus(-d(g(noise))).mean())
        else:  # the generator's first micro-batch sees the discriminator of before its update
            half = len(noise) // 2
            of_g.zero_grad()
            (F.softplus(-before[1](g(noise[:half]))).mean() / 2 + F.softplus(-d(g(noise[half:]))).mean() / 2).backward()
            of_g.step()
    assert off(ours_d, d) < 1e-6
    assert off(ours_g, g) < 1e-6


def test_gradients_of_before_the_run_and_of_a_late_group_are_dropped():
    model, right = net(), net()
    x, y = data()
    model[0].requires_grad_(True)
    accel = accelerated(model, sgd(model[2]))
    optimizer = sgd(right[2])
    F.cross_entropy(model(x), y).backward()
    for step in range(4):
        if step == 2:
            accel.optimizer.add_param_group({"params": model[0].parameters()})
            optimizer.add_param_group({"params": right[0].parameters()})
        with accel.forward(x) as moved:
            loss = F.cross_entropy(model(moved), y)
        accel.backward(loss, weight=24)
        plain(right, optimizer, F.cross_entropy(right(x), y))
    assert off(model, right) < 1e-6


def test_kept_gradients_are_zeroed_in_place_at_a_windows_start():
    """As CUDA graphs need."""
    model, right = net(), net()
    x, y = data()
    accel, optimizer = accelerated(model, accumulate=2), sgd(right)
    accel.session.update.keep_gradients = lambda: True
    accel._step._gradients._keep = lambda: True
    F.cross_entropy(model(x), y).backward()
    kept = [p.grad for p in model.parameters()]
    for k in (slice(0, 12), slice(12, 24)):
        with accel.forward(x[k]) as moved:
            loss = F.cross_entropy(model(moved), y[k])
        accel.backward(loss, weight=12)
    plain(right, optimizer, F.cross_entropy(right(x), y))
    assert off(model, right) < 1e-6
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), kept, strict=True))


def test_another_backward_between_forward_and_backward_is_told_and_dropped():
    said = []
    model, right = net(), net()
    x, y = data()
    accel, optimizer = accelerated(model, say=said.append), sgd(right)
    for _ in range(2):
        with accel.forward(x) as moved:
            loss = F.cross_entropy(model(moved), y)
        model(x).square().mean().backward()
        accel.backward(loss, weight=24)
        plain(right, optimizer, F.cross_entropy(right(x), y))
    assert off(model, right) < 1e-6
    assert sum("no part of the update" in line for line in said) == 1


def test_siamese_two_forwards_and_one_backward_are_one_micro_batch():
    model, right = net(), net()
    x, y = data()
    accel = accelerated(model, accumulate=2)
    for k in (slice(0, 12), slice(12, 24)):
        with accel.forward(x[k]) as moved:
            u = model(moved)
        with accel.forward(x[k] + 0.1) as moved:
            v = model(moved)
        accel.backward((u - v).square().mean() + F.cross_entropy(u, y[k]), weight=12)
    u, v = right(x), right(x + 0.1)
    plain(right, sgd(right), (u - v).square().mean() + F.cross_entropy(u, y))
    assert accel.updates == 1
    assert accel.session.series.samples == 24
    assert off(model, right) < 1e-6


def test_a_forward_and_continue_or_an_evaluation_counts_nothing():
    model, right = net(), net()
    x, y = data()
    x[3] = float("nan")
    accel, optimizer = accelerated(model, accumulate=2), sgd(right)
    for at in range(0, 24, 4):
        with torch.no_grad(), accel.forward(x[:12]) as moved:
            model(moved)
        with accel.forward(x[at : at + 4]) as moved:
            loss = F.cross_entropy(model(moved), y[at : at + 4])
        if not loss.isfinite():
            continue
        accel.backward(loss, weight=4)
    accel.flush()
    for at in (4, 12, 20):
        plain(right, optimizer, F.cross_entropy(right(x[at : at + 8]), y[at : at + 8]))
    assert accel.updates == 3
    assert accel.session.report.window.micro_batches == 5
    assert off(model, right) < 1e-6


@pytest.mark.parametrize("weight", [0, torch.tensor(0)])
def test_a_micro_batch_without_targets_adds_nothing_though_its_loss_is_nan(weight):
    model, right = net(), net()
    x, y = data()
    accel = accelerated(model, accumulate=3)
    nothing = torch.full((8,), -100)
    for k, labels, count in ((slice(0, 8), y[:8], 8), (slice(8, 16), nothing, weight), (slice(16, 24), y[16:], 8)):
        with accel.forward(x[k]) as moved:
            loss = F.cross_entropy(model(moved), labels)
        accel.backward(loss, weight=count)
    plain(right, sgd(right), F.cross_entropy(right(x), torch.cat([y[:8], nothing, y[16:]])))
    assert (accel.updates, accel.session.report.window.skipped_updates) == (1, 0)
    assert off(model, right) < 1e-6


def test_a_backward_that_fails_leaves_no_gradient_and_drops_its_window():
    """Out of memory, caught by the loop, which goes on."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("told")

    model, right = net(), net()
    x, y = data()
    accel = accelerated(model, accumulate=2)

    def step(k, fails=False):
        with accel.forward(x[k]) as moved:
            out = model[2](Fails.apply(model[:2](moved)) if fails else model[:2](moved))
            loss = F.cross_entropy(out, y[k])
        accel.backward(loss, weight=12)

    step(slice(0, 12))
    with pytest.raises(torch.OutOfMemoryError):
        step(slice(0, 12), fails=True)
    assert all(p.grad is None for p in model.parameters())
    step(slice(0, 12))
    step(slice(12, 24))
    plain(right, sgd(right), F.cross_entropy(right(x), y))
    assert accel.updates == 1
    assert accel.session.report.window.dropped_micro_batches == 2
    assert off(model, right) < 1e-6


def test_a_parameter_frozen_in_the_middle_of_a_window_does_not_move():
    model = net()
    x, y = data()
    accel = accelerated(model, accumulate=2)
    before = model[0].weight.detach().clone()
    for k in (slice(0, 12), slice(12, 24)):
        with accel.forward(x[k]) as moved:
            loss = F.cross_entropy(model(moved), y[k])
        accel.backward(loss, weight=12)
        model[0].requires_grad_(False)
    assert torch.equal(model[0].weight, before)


def test_a_skipped_first_update_does_not_step_the_schedule():
    model = net()
    x, y = data()
    accel = accelerated(model, schedule=lambda steps: torch.optim.lr_scheduler.StepLR(steps, 1, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (float("nan"), 1.0):
            with accel.forward(x * value) as moved:
                loss = F.cross_entropy(model(moved), y)
            accel.backward(loss, weight=24)
    assert accel.updates == 2
    assert accel.optimizer.param_groups[0]["lr"] == 0.05


def test_saved_between_micro_batches_with_foreign_gradients_resumes_bit_for_bit(tmp_path):
    x, y = data()

    def run(accel, parts):
        for k in parts:
            with accel.forward(x[k]) as moved:
                loss = F.cross_entropy(accel.model(moved), y[k])
            accel.backward(loss, weight=6)
            accel.model(x).square().mean().backward()

    parts = [slice(at, at + 6) for at in (0, 6, 12, 18)]
    straight, first, second = (accelerated(net(), accumulate=2) for _ in range(3))
    run(straight, parts)
    run(first, parts[:3])
    first.save(tmp_path / "half.pt")
    run(first, parts[3:])
    second.resume(tmp_path / "half.pt")
    run(second, parts[3:])
    assert off(straight.model, first.model) == off(straight.model, second.model) == 0
