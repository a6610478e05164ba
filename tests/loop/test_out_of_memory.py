"""Memory that runs out in a hand-written loop: the run ends as one that had the smaller micro-batch from the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from plugins.core.step.rescue import OutOfMemory, UpdateOutOfMemory
from plugins.errors import AccelError
from plugins.loop.out_of_memory import weighed
from tests.loops import accelerated, data, off
from tests.short import TOLD, Short

SAMPLES, BATCH, K, UPDATES = 60, 4, 2, 8  # the last window is a micro-batch short, the last micro-batch is whole


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Loop:
    """A loop over labels of which some do not count, with a schedule, over shuffled samples."""

    def __init__(self, short=None, batch=BATCH, accumulate=K, norm=False, lines=None, **options):
        torch.manual_seed(0)
        self.short = short or Short()
        middle = nn.BatchNorm1d(16) if norm else nn.Tanh()
        self.model = nn.Sequential(nn.Linear(8, 16), middle, self.short, nn.Linear(16, 3))
        x, y = data(SAMPLES)
        self.loader = DataLoader(TensorDataset(x, y), batch, shuffle=True, generator=torch.Generator().manual_seed(3))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        say = (lambda line: None) if lines is None else lines.append
        self.accel = accelerated(
            self.model,
            optimizer,
            accumulate=accumulate,
            schedule=lambda steps: torch.optim.lr_scheduler.StepLR(steps, 3, 0.5),
            say=say,
            plan="off",
            compile="off",
            **options,
        )
        self.losses = []

    def loss(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def run(self, epochs=1):
        self.accel.train()
        for _ in range(epochs):
            for batch in self.accel.batches(self.loader):
                self.losses.append(float(self.accel.training_step(self.loss, batch)))
        return self

    @property
    def facts(self):
        return self.accel.session.report


def after(update):
    """Micro-batches before the second one of this update."""
    return (update - 1) * K + 1


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("update", [1, 7, 8])
def test_the_run_equals_that_with_the_smaller_micro_batch_from_the_start(update, backward):
    calls = after(update) if update < UPDATES else after(update) - 1
    lines = []
    saved = Loop(Short(most=2, after=calls, backward=backward), lines=lines).run()
    right = Loop(batch=2, accumulate=4).run()
    assert saved.short.failed == 1
    assert off(saved.model, right.model) < 1e-6
    assert saved.accel.scheduler.state_dict()["last_epoch"] == right.accel.scheduler.state_dict()["last_epoch"]
    facts = saved.facts
    assert (facts.window.updates, facts.window.accumulate, facts.window.micro_batch) == (UPDATES, 4, 2)
    assert (facts.window.effective_batch, facts.window.dropped_micro_batches) == (8, 0)
    assert facts.memory.out_of_memory == {"count": 1, "update": update - 1, "micro_batch": 2}
    assert [line for line in lines if "out of memory" in line] == [f"accel: {facts.warnings[0]}"]
    means = torch.tensor(right.losses).view(-1, 2).mean(1)
    assert torch.allclose(torch.tensor(saved.losses), means, atol=1e-5)


def test_a_window_of_one_micro_batch_is_halved_twice():
    saved = Loop(Short(most=1, after=5), batch=4, accumulate=1).run()
    right = Loop(batch=1, accumulate=4).run()
    assert (saved.short.failed, saved.facts.memory.out_of_memory["count"]) == (2, 2)
    assert (saved.facts.window.micro_batch, saved.facts.window.effective_batch) == (1, 4)
    assert off(saved.model, right.model) < 1e-6


@pytest.mark.parametrize("rule", ["host", "momentum", "freeze"])
def test_batchnorm_s_statistics_are_those_of_the_smaller_micro_batch(rule):
    saved = Loop(Short(most=2), norm=True, batchnorm=rule).run()
    right = Loop(batch=2, accumulate=4, norm=True, batchnorm=rule).run()
    assert off(saved.model, right.model) < 1e-6
    assert torch.allclose(saved.model[1].running_var, right.model[1].running_var, atol=1e-6)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_every_form_of_the_error_is_known(error):
    saved = Loop(Short(most=2, error=error)).run()
    assert saved.facts.memory.out_of_memory["count"] == 1


def test_another_error_passes_as_it_is():
    class Other(Short):
        def forward(self, x):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    loop = Loop(Other())
    with pytest.raises(RuntimeError, match="shapes cannot"):
        loop.run()
    assert not loop.facts.memory.out_of_memory


def test_a_weight_that_counts_targets_is_asked_for_each_piece():
    x, y = data(SAMPLES)
    y[::3] = -100

    def run(loop, count):
        loop.loader = DataLoader(TensorDataset(x, y), loop.loader.batch_size)
        for batch in loop.accel.batches(loop.loader):
            loop.accel.training_step(loop.loss, batch, weight=count)
        return loop

    def targets(batch):
        return (batch[1] != -100).sum()

    saved, right = run(Loop(Short(most=2)), targets), run(Loop(batch=2, accumulate=4), targets)
    assert off(saved.model, right.model) < 1e-6


def test_a_number_of_targets_that_are_no_samples_cannot_be_divided():
    loop = Loop(Short(most=2))
    batch = next(iter(loop.loader))
    with pytest.raises(OutOfMemory, match="weight as a function of the batch") as caught:
        loop.accel.training_step(loop.loss, batch, weight=3.0)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, AccelError)
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_one_sample_that_does_not_fit_stops_with_the_last_update_s_weights():
    loop, right = Loop(Short(most=0, after=5), batch=1), Loop(batch=1)
    with pytest.raises(OutOfMemory, match="at update 2 with a micro-batch of 1, which cannot be made smaller"):
        loop.run()
    for _, batch in zip(range(4), right.loader, strict=False):
        right.accel.training_step(right.loss, batch)
    assert off(loop.model, right.model) == 0
    assert all(p.grad is None for p in loop.model.parameters())
    assert loop.accel.updates == 2


def test_a_resumed_run_divides_as_the_saved_one_did(tmp_path):
    straight, first, second = (Loop(Short(most=2)) for _ in range(3))
    for loop, batches in ((straight, 9), (first, 5), (second, 9)):
        if loop is second:
            first.accel.save(tmp_path / "half.pt")
            second.accel.resume(tmp_path / "half.pt")
        for at, batch in enumerate(loop.loader):
            if at < batches and not (loop is second and at < 5):
                loop.accel.training_step(loop.loss, batch)
    assert second.short.failed == 0
    assert off(straight.model, second.model) == 0


def test_a_window_that_was_begun_before_the_resume_is_not_done_again(tmp_path):
    first, second = Loop(), Loop(Short(most=2))
    batches = list(first.loader)
    first.accel.training_step(first.loss, batches[0])
    first.accel.save(tmp_path / "half.pt")
    second.accel.resume(tmp_path / "half.pt")
    with pytest.raises(OutOfMemory, match="before this run was resumed"):
        second.accel.training_step(second.loss, batches[1])


def test_dropout_draws_what_it_drew_and_a_loader_s_draws_are_not_repeated():
    """The loader augments in this process, from the same generator as dropout."""
    drawn = []

    def augmented(items):
        drawn.append(float(torch.rand(())))
        return [torch.stack(column) for column in zip(*items, strict=True)]

    loop = Loop(Short(most=2, after=1))
    loop.loader = DataLoader(loop.loader.dataset, BATCH, collate_fn=augmented)
    loop.model[1] = nn.Dropout(0.5)
    loop.run()
    assert len(set(drawn)) == len(drawn) == 15


def test_an_optimizer_s_step_that_does_not_fit_stops_in_one_line():
    loop = Loop()

    def before(*args):
        if loop.accel.updates == 2:
            raise torch.OutOfMemoryError(TOLD)

    loop.accel.session.optimizer.register_step_pre_hook(before)
    with pytest.raises(
        UpdateOutOfMemory, match="in the optimizer's step of update 2; some weights may have it"
    ) as found:
        loop.run()
    assert "\n" not in str(found.value)
    assert isinstance(found.value, AccelError)
    assert loop.accel.session.window.empty
    assert all(p.grad is None for p in loop.model.parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_plain_forward_and_backward_stop_in_one_line(where):
    loop = Loop(Short(most=2, backward=where == "backward"))
    batch = next(iter(loop.loader))

    def step():
        with loop.accel.forward(*batch) as placed:
            loss = loop.loss(placed)
        loop.accel.backward(loss, weight=len(batch[0]))

    with pytest.raises(OutOfMemory, match=r"use accel\.training_step\(loss_fn, batch\)"):
        step()
    assert all(p.grad is None for p in loop.model.parameters())


def test_pieces_have_their_own_targets():
    batch = {"x": torch.ones(4, 2), "y": torch.ones(4, 5, 5)}
    assert [weight for _, weight in weighed(batch, None, 3)] == [3, 1]
    assert [weight for _, weight in weighed(batch, 4, 3)] == [3, 1]
    assert [weight for _, weight in weighed(batch, 100, 3)] == [75, 25]
    assert [weight for _, weight in weighed(batch, 99, None)] == [99]
