"""The loop's gradients are those of the big batch: unequal micro-batches, unequal widths, unequal labels."""

from __future__ import annotations

import copy
from itertools import islice

import pytest
import torch
from torch import nn

from integrations.easyocr.labels import converter, ctc_loss, encode
from integrations.easyocr.network import build, read
from plugins import easyocr as plug
from plugins.loop import Accelerated
from tests import reference

PARAMS = {"input_channel": 1, "output_channel": 16, "hidden_size": 16}


def frozen_train(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def window_loss(model, window):
    """The mean over all samples of a window, each at its own micro-batch's width: the big batch's loss."""
    total = sum(len(labels) for _, labels in window)
    losses = [
        ctc_loss(read(model, images), *encode(labels, converter("0123456789"))) * len(labels)
        for images, labels in window
    ]
    return sum(losses) / total


@pytest.fixture
def micro_batches():
    torch.manual_seed(3)
    shapes = [(4, 96), (4, 64), (2, 160), (4, 64), (1, 128), (3, 96), (4, 128)]
    found = []
    for count, width in shapes:
        labels = ["".join(map(str, torch.randint(0, 10, (int(n),)).tolist())) for n in torch.randint(1, 6, (count,))]
        found.append((torch.rand(count, 1, 32, width) * 2 - 1, labels))
    return found


def test_a_ragged_run_equals_the_reference(micro_batches):
    """7 micro-batches, K = 3: windows of 3, 3 and 1."""
    torch.manual_seed(0)
    model = build("VGG", 11, PARAMS)
    windows = [micro_batches[0:3], micro_batches[3:6], micro_batches[6:]]

    def steps(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    right, average = reference.train(frozen_train(model), windows, window_loss, steps, clip_norm=0.5, decay=0.5)
    ours = copy.deepcopy(model)
    accel = Accelerated(
        ours, steps(ours.parameters()), micro_batch=4, accumulate=3, clip_norm=0.5, ema=0.5, batchnorm="freeze",
        memory_format="host", say=lambda line: None,
    )  # fmt: skip
    accel.average.ramp = False
    accel.train()
    for images, labels in micro_batches:
        with accel.forward(images) as images:
            loss = ctc_loss(read(ours, images), *encode(labels, converter("0123456789")))
        accel.backward(loss, weight=len(labels))
    accel.flush()
    accel.end()
    assert accel.updates == 3
    assert reference.difference(ours.state_dict(), right.state_dict()) < 1e-6
    shadow = {n: t for n, t in accel.weights().items() if t.is_floating_point()}
    assert reference.difference(shadow, {n: average[n] for n in shadow}) < 1e-6


@pytest.mark.parametrize(("batch", "forward_px"), [(5, 0), (20, 1)], ids=["whole", "in parts"])
def test_the_gradients_of_fit_equal_the_reference(tiny, monkeypatch, batch, forward_px):
    """Every update of a real run: its gradient against one big batch of the same lines, from the same weights."""
    recorded, runs = [], []
    make, prepare = plug.training.optimizer.optimizer, plug.prepare

    def spied_prepare(*args):
        runs.append(prepare(*args))
        return runs[-1]

    def spied(parameters, settings):
        steps = make(parameters, settings)

        def before(optimizer, args, kwargs):
            model = runs[0].model
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            recorded.append((copy.deepcopy(model), gradients))

        steps.register_step_pre_hook(before)
        return steps

    monkeypatch.setattr(plug, "prepare", spied_prepare)
    monkeypatch.setattr(plug.training.optimizer, "optimizer", spied)
    monkeypatch.setattr(plug.training, "Run", Kept)
    plug.fit(
        tiny, num_iter=6, batch_size=batch, accumulate=3, clip_norm="off", batchnorm="freeze", forward_px=forward_px,
        say=lambda line: None,
    )  # fmt: skip
    run = Kept.last
    order = list(islice(run.batches.from_position(0), 18))
    assert {len(found.indices) for found in order} == {4, batch}  # 24 lines: every epoch has a partial batch
    assert forward_px or len({found.width for found in order}) > 1
    for number, (model, gradients) in enumerate(recorded):
        lines = [run.prepared.lines[found] for found in order[3 * number : 3 * number + 3]]
        right = reference.gradients(frozen_train(model), [(b.images, b.labels) for b in lines], window_loss)
        assert reference.difference(gradients, right) < 1e-6
    assert len(recorded) == 6


class Kept(plug.training.Run):
    last: plug.training.Run

    def __init__(self, *args):
        super().__init__(*args)
        Kept.last = self
