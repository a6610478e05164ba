"""Accelerated: exactness, every setting, save and resume, and the ResNet twins."""

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

EXAMPLES = Path(__file__).parents[2] / "examples"


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def batches(sizes, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 1, 8, 8, generator=draw), torch.randint(3, (n,), generator=draw)) for n in sizes]


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def accelerated(model, optimizer=None, **options):
    return Accelerated(
        model, optimizer or sgd(model.parameters()), say=lambda line: None, **{"memory_format": "host", **options}
    )


def run(accel, data):
    accel.train()
    for images, labels in data:
        with accel.forward(images, labels) as (moved, targets):
            loss = nn.functional.cross_entropy(accel.model(moved), targets)
        accel.backward(loss, weight=len(labels))


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


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_resumed_run_equals_the_straight_one_bit_for_bit(tmp_path, at):
    """Saved in the middle of a window as well: its gradients are in the file."""
    data = batches([4] * 8)

    def make():
        model = network()
        return accelerated(
            model, torch.optim.AdamW(model.parameters()), accumulate=2, ema=0.9,
            schedule=lambda steps: torch.optim.lr_scheduler.OneCycleLR(steps, 0.1, 5),
        )  # fmt: skip

    straight = make()
    run(straight, data)
    straight.save(tmp_path / "straight.pt")
    first = make()
    run(first, data[:at])
    first.save(tmp_path / "half.pt", epoch=3)
    torch.manual_seed(99)
    second = make()
    assert second.resume(tmp_path / "half.pt") == {"epoch": 3}
    run(second, data[at:])
    second.save(tmp_path / "second.pt")
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("straight.pt", "second.pt"))
    for part in ("model", "average", "optimizer", "scheduler", "window", "counts"):
        assert str(a[part]) == str(b[part]), part
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name])
        assert torch.equal(a["average"]["shadow"][name], b["average"]["shadow"][name])


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


def test_files_that_resume_refuses(tmp_path):
    accel = accelerated(network())
    with pytest.raises(AccelError, match="no such file"):
        accel.resume(tmp_path / "none.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(AccelError, match="not a checkpoint of schema 1"):
        accel.resume(tmp_path / "other.pt")
    (tmp_path / "cut.pt").write_bytes(accel.save(tmp_path / "whole.pt").read_bytes()[:500])
    with pytest.raises(AccelError, match="not readable"):
        accel.resume(tmp_path / "cut.pt")
    with pytest.raises(AccelError, match=r"of another model: weight is missing there, \[2, 2\] here"):
        accelerated(nn.Linear(2, 2)).resume(tmp_path / "whole.pt")


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


def test_save_and_weights_inside_validation_are_those_outside(tmp_path):
    accel = accelerated(network(), ema=0.5)
    run(accel, batches([4, 4]))
    right, live = accel.weights(), copy.deepcopy(accel.model.state_dict())
    with accel.validation():
        inside = accel.weights()
        accel.save(tmp_path / "inside.pt")
    accel.save(tmp_path / "outside.pt")
    assert all(torch.equal(inside[name], right[name]) for name in right)
    saved = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("inside", "outside")]
    for name in live:
        assert torch.equal(saved[0]["model"][name], live[name])
        assert torch.equal(saved[0]["average"]["shadow"][name], saved[1]["average"]["shadow"][name])


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


def test_a_checkpoint_of_another_optimizer_changes_nothing(tmp_path):
    model = network()
    first = accelerated(model, torch.optim.AdamW(model.parameters()))
    run(first, batches([4]))
    first.save(tmp_path / "adamw.pt")
    second = accelerated(network())
    before = copy.deepcopy(second.model.state_dict())
    with pytest.raises(AccelError, match="another optimizer than this run's: AdamW there, SGD here"):
        second.resume(tmp_path / "adamw.pt")
    assert all(torch.equal(before[name], t) for name, t in second.model.state_dict().items())


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    accel = accelerated(network())
    with pytest.raises(AccelError, match="save: where holds "):
        accel.save(tmp_path / "last.pt", where=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_without_parameters():
    with pytest.raises(AccelError, match="model=ReLU: has no parameters"):
        Accelerated(nn.ReLU(), sgd(network().parameters()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"gradients": None}, "damaged: gradients is NoneType"),
        ({"window": []}, "damaged: window is list"),
        (
            {"kinds": {"optimizer": "SGD", "schedule": "OneCycleLR"}},
            "another schedule than this run's: OneCycleLR there, none here",
        ),
    ],
)
def test_a_file_that_does_not_belong_here_changes_nothing(tmp_path, damage, message):
    first = accelerated(network())
    run(first, batches([4]))
    path = first.save(tmp_path / "last.pt")
    torch.save(torch.load(path, weights_only=True) | damage, path)
    second = accelerated(network())
    before = copy.deepcopy(second.model.state_dict())
    with pytest.raises(AccelError, match=message):
        second.resume(path)
    assert all(torch.equal(before[name], t) for name, t in second.model.state_dict().items())


def test_parameters_in_another_order_are_refused(tmp_path):
    def ordered(way):
        model = network()
        return accelerated(model, torch.optim.AdamW(list(model.parameters())[::way]))

    first = ordered(1)
    run(first, batches([4]))
    path = first.save(tmp_path / "last.pt")
    with pytest.raises(AccelError, match=r"another optimizer than AdamW: exp_avg of parameter 0 is "):
        ordered(-1).resume(path)


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_a_models_extra_state_is_saved_and_shipped(tmp_path):
    first = accelerated(Extra(3, 2))
    assert first.weights()["_extra_state"] == {"seen": 3}
    path = first.save(tmp_path / "last.pt")
    second = accelerated(Extra(3, 2))
    second.resume(path)
    assert second.model.seen == 3
