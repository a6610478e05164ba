"""Accelerated: what is saved, what resuming from it gives, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plugins.core.checkpoint import loop_checkpoint
from plugins.errors import AccelError
from tests.loop.convolution import accelerated, batches, network, run


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


class Image(torch.Tensor):
    """As torchvision's: a reader would have to trust the class."""


def named(path):
    tensor = torch.ones(2)
    tensor.source = path
    return tensor


@pytest.mark.parametrize(
    ("sample", "kind"),
    [
        (lambda path: path, ".*Path"),
        (lambda path: torch.ones(2).as_subclass(Image), "Image"),
        (named, ".*Path"),
        (lambda path: torch.ones(2, device="meta"), "Tensor"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, sample, kind):
    accel = accelerated(network())
    path = accel.save(tmp_path / "last.pt", sample=torch.ones(2))
    good = path.read_bytes()
    with pytest.raises(AccelError, match=f"save: sample holds {kind}; "):
        accel.save(path, sample=sample(tmp_path))
    assert [found.read_bytes() for found in tmp_path.iterdir()] == [good]


def test_a_save_takes_tensors_from_their_device_once(tmp_path, monkeypatch):
    on_cpu, moved = loop_checkpoint.on_cpu, []

    def counted(state):
        moved.append(sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state)))
        return on_cpu(state)

    monkeypatch.setattr(loop_checkpoint, "on_cpu", counted)
    accelerated(network()).save(tmp_path / "last.pt", sample=torch.ones(2))
    assert moved[-1] > 0
    assert not any(moved[:-1])


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
    with pytest.raises(AccelError, match=r"another optimizer than AdamW: parameter 0 is "):
        ordered(-1).resume(path)
    state = torch.load(path, weights_only=True)
    del state["parameter_shapes"]  # as 0.1
    torch.save(state, path)
    ordered(1).resume(path)
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
