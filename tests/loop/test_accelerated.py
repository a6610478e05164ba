"""Accelerated: exactness, every setting, and the ResNet twins."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from plugins.config import AccelConfig
from plugins.errors import AccelError
from plugins.loop import Accelerated
from tests import reference
from tests.loop.convolution import accelerated, batches, loss_of, network, run, sgd

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_ragged_windows_equal_the_big_batch():
    model, data = network(), batches([4, 2, 3, 1, 4, 4, 2])
    for layer in (model, ours := copy.deepcopy(model)):
        layer.train()
        layer[1].eval()
    windows = [data[0:3], data[3:6], data[6:]]
    whole = [tuple(torch.cat(parts) for parts in zip(*window, strict=True)) for window in windows]
    right, average = reference.train(model, whole, loss_of, sgd, clip_norm=0.5, decay=0.9)
    accel = accelerated(ours, accumulate=3, clip_norm="0.5", ema=0.9, batchnorm="freeze")
    accel.average.ramp = False
    run(accel, data)
    assert accel.updates == 2
    accel.flush()
    assert accel.updates == 3
    accel.end()
    assert reference.difference(ours.state_dict(), right.state_dict()) < 1e-6
    floats = {n: t for n, t in accel.weights().items() if t.is_floating_point()}
    assert reference.difference(floats, {n: average[n] for n in floats}) < 1e-6


def test_validation_sees_the_average_counts_nothing_and_puts_everything_back():
    accel = accelerated(network(), ema=0.5)
    run(accel, batches([4, 4]))
    live = copy.deepcopy(accel.model.state_dict())
    with accel.validation() as model, accel.forward(batches([4])[0][0]) as images:
        assert not model.training
        assert not torch.is_grad_enabled()
        assert not torch.equal(model[0].weight, live["0.weight"])
        model(images)
    assert accel.model.training
    assert all(torch.equal(live[n], t) for n, t in accel.model.state_dict().items())
    assert accel.session.report.window.micro_batches == 2
    shipped = accel.weights()
    assert not torch.equal(shipped["0.weight"], live["0.weight"])


def test_bf16_runs_forward_in_autocast_and_backward_outside():
    accel = accelerated(network(), precision="bf16")
    images, labels = batches([4])[0]
    with accel.forward(images) as images:
        logits = accel.model(images)
        assert logits.dtype == torch.bfloat16
        loss = nn.functional.cross_entropy(logits, labels)
        with pytest.raises(AccelError, match="inside autocast"):
            accel.backward(loss, weight=4)
    accel.backward(loss, weight=4)
    assert accel.updates == 1
    assert accel.model[0].weight.dtype == torch.float32


def test_channels_last_effective_batch_and_lr_scale():
    model = network()
    options = {"effective_batch": 12, "lr_scale": "linear", "memory_format": "channels_last"}
    accel = Accelerated(model, sgd(model.parameters()), micro_batch=4, say=lambda line: None, **options)
    assert accel.accumulate == 3
    assert accel.optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    with accel.forward(torch.zeros(2, 3, 4, 4)) as images:
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_compile_is_in_place_and_validation_stays_eager(tmp_path):
    accel = accelerated(network(), compile="on", compile_backend="eager", ema=0.9)
    run(accel, batches([4, 4]))
    with accel.validation() as model:
        model(torch.zeros(5, 1, 8, 8))
    path = accel.save(tmp_path / "last.pt")
    accel.end(tmp_path)
    report = json.loads((tmp_path / "accel_report.json").read_text())
    assert report["compile"]["decision"] == "whole"
    assert report["compile"]["graphs"] == 1
    assert list(torch.load(path, weights_only=True)["model"]) == list(network().state_dict())
    assert "_compiled_call_impl" not in accel.model.__dict__


def test_a_context_closes_the_last_window_and_an_error_does_not():
    with accelerated(network(), accumulate=3) as accel:
        run(accel, batches([4, 4]))
    assert accel.updates == 1
    again = accelerated(network(), accumulate=3)
    run(again, batches([4]))
    with pytest.raises(ZeroDivisionError), again:
        again.updates / 0
    assert again.updates == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"acumulate": 2}, "did you mean accumulate"),
        ({"accumulate": 0}, "accumulate=0: allowed are"),
        ({"effective_batch": 8}, "needs micro_batch"),
        ({"effective_batch": 10, "micro_batch": 4}, "effective_batch=10: not a multiple of the 4 .*: 8 or 12"),
        ({"effective_batch": 2, "micro_batch": 4}, "near it: 4"),
        ({"precision": "fp16"}, "precision=fp16: not on a CPU"),
        ({"compile": "on", "compile_scope": "regional"}, "no repeated blocks"),
    ],
)
def test_mistakes_are_one_line(options, told):
    with pytest.raises(AccelError, match=told):
        accelerated(network(), **options)


def test_the_twins_train_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain, plugged = (importlib.import_module(name) for name in ("loop_resnet_plain", "loop_resnet"))
    nothing = {"memory_format": "host"}
    try:
        assert plain.main(1, 16, 96) == plugged.main(1, 16, 96, str(tmp_path / "same"), nothing)
        assert plugged.main(2, 16, 96, str(tmp_path / "more")) > 0
        assert plugged.main(2, 16, 96, str(tmp_path / "more")) == 0.0  # both epochs are in its checkpoint
        assert capsys.readouterr().out.count("epoch 2") == 1
    finally:
        for name in ("loop_resnet_plain", "loop_resnet", "gratings"):
            sys.modules.pop(name, None)


def test_options_beside_a_config_are_laid_over_it():
    accel = accelerated(network(), config=AccelConfig(ema=0.9), accumulate=4)
    assert (accel.accumulate, accel.config.ema) == (4, 0.9)
    with pytest.raises(AccelError, match="nonsense"):
        accelerated(network(), config=AccelConfig(), nonsense=3)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", None])
def test_a_weight_that_is_no_count(weight):
    accel = accelerated(network())
    with pytest.raises(AccelError, match="expected a count of targets"):
        accel.backward(torch.ones((), requires_grad=True), weight=weight)


def test_a_model_without_parameters():
    with pytest.raises(AccelError, match="model=ReLU: has no parameters"):
        Accelerated(nn.ReLU(), sgd(network().parameters()))
