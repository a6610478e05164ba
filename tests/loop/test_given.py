"""What a hand-written loop is given: models, optimizers, schedules and batches of every kind, or one line."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plugins.errors import AccelError
from plugins.loop.nested import mapped, samples
from tests.loops import accelerated, data, net, off, sgd


def step(accel, x, y, loss_of=None):
    with accel.forward(x) as moved:
        out = accel.model(moved)
        loss = loss_of(out, y) if loss_of else F.cross_entropy(out, y)
    return accel.backward(loss, weight=len(y))


# -- beside the model --------------------------------------------------------------------------------------------


class Head(nn.Module):
    """As ArcFace: class weights that the criterion has and the model has not."""

    def __init__(self, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, out, y):
        return F.cross_entropy(self.scale * F.linear(F.normalize(out), F.normalize(self.weight)), y)


def with_head(seed=0, **options):
    model, head = net(seed), Head(seed + 3)
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": head.parameters(), "lr": 0.01}])
    return accelerated(model, optimizer, **options), head


def test_a_criterions_parameters_train_clip_and_accumulate_as_in_a_plain_loop():
    accel, head = with_head(accumulate=2, clip_norm=0.1)
    right, right_head = net(), Head()
    both = nn.ModuleList([right, right_head])
    optimizer = torch.optim.AdamW([{"params": right.parameters()}, {"params": right_head.parameters(), "lr": 0.01}])
    x, y = data()
    for _ in range(2):
        for k in (slice(0, 8), slice(8, 24)):
            step(accel, x[k], y[k], head)
        optimizer.zero_grad()
        right_head(right(x), y).backward()
        nn.utils.clip_grad_norm_(both.parameters(), 0.1)
        optimizer.step()
    assert off(nn.ModuleList([accel.model, head]), both) < 2e-6


@pytest.mark.parametrize("at", [2, 3])
def test_a_criterions_parameters_are_saved_and_resumed_bit_for_bit(tmp_path, at):
    x, y = data()
    parts = [slice(k, k + 4) for k in range(0, 24, 4)]
    (straight, head), (second, other) = with_head(accumulate=2), with_head(7, accumulate=2)
    for index, k in enumerate(parts):
        if index == at:
            straight.save(tmp_path / "half.pt")
        step(straight, x[k], y[k], head)
    second.resume(tmp_path / "half.pt")
    for k in parts[at:]:
        step(second, x[k], y[k], other)
    assert off(head, other) == off(straight.model, second.model) == 0


def test_other_parameters_beside_the_model_are_refused_in_one_line(tmp_path):
    model, head = net(), nn.Parameter(torch.ones(4))
    accel = accelerated(model, torch.optim.SGD([*model.parameters(), head], lr=0.1))
    path = accel.save(tmp_path / "last.pt")
    again = net()
    optimizer = torch.optim.SGD([*again.parameters(), nn.Parameter(torch.ones(5))], lr=0.1)
    with pytest.raises(AccelError, match=r"beside the model: \[\[4\]\] there, \[\[5\]\] here"):
        accelerated(again, optimizer).resume(path)


def test_a_layer_that_was_added_in_the_run_is_the_models_own_when_resumed(tmp_path):
    def grown(model):
        torch.manual_seed(9)
        model.append(nn.Linear(3, 3))
        return model

    x, y = data()
    first = accelerated(net())
    step(first, x, y)
    first.optimizer.add_param_group({"params": grown(first.model)[3].parameters()})
    step(first, x, y)
    path = first.save(tmp_path / "last.pt")
    model = grown(net(4))
    groups = [{"params": model[:3].parameters()}, {"params": model[3].parameters()}]
    second = accelerated(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    second.resume(path)
    assert off(first.model, second.model) == 0


# -- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), nn.DataParallel])
def test_a_wrapped_model_trains_and_its_file_has_the_bare_names(tmp_path, wrap):
    model, right = net(), net()
    x, y = data()
    given = wrap(model)
    accel = accelerated(given, ema=0.5)
    step(accel, x, y)
    optimizer = sgd(right)
    F.cross_entropy(right(x), y).backward()
    optimizer.step()
    path = accel.save(tmp_path / "last.pt")
    state = torch.load(path, weights_only=True)
    assert list(state["model"]) == list(state["average"]["shadow"]) == list(accel.weights()) == list(net().state_dict())
    assert off(model, right) < 1e-6
    with accel.validation() as held:
        assert not held.training
        assert not model.training
    bare = accelerated(net(5), ema=0.5)
    bare.resume(path)
    assert off(bare.model, model) == 0
    with pytest.raises(AccelError, match="compile=on: the model is wrapped already"):
        accelerated(wrap(net()), compile="on")


def test_a_compiled_part_of_a_model_has_the_bare_names_in_the_file(tmp_path):
    model = net()
    model[0] = torch.compile(model[0], backend="eager")
    x, y = data()
    accel = accelerated(model, ema=0.5, accumulate=2)
    step(accel, x, y)
    path = accel.save(tmp_path / "last.pt")
    state = torch.load(path, weights_only=True)
    assert list(state["model"]) == list(state["gradients"]) == list(net().state_dict())
    bare = accelerated(net(5), ema=0.5, accumulate=2)
    bare.resume(path)
    again = net(6)
    again[0] = torch.compile(again[0], backend="eager")
    accelerated(again, ema=0.5, accumulate=2).resume(path)
    assert off(bare.model, model) == off(again, model) == 0


def test_the_average_of_complex_parameters_is_the_formula():
    model = nn.Linear(3, 2, dtype=torch.complex64)
    accel = accelerated(model, ema=0.5)
    accel.average.ramp = False
    before = model.weight.detach().clone()
    with accel.forward(torch.randn(4, 3, dtype=torch.complex64)) as x:
        loss = model(x).abs().square().mean()
    accel.backward(loss, weight=4)
    assert not torch.equal(before, model.weight)
    assert torch.allclose(accel.weights()["weight"], (before + model.weight.detach()) / 2)


def test_the_average_of_bf16_weights_is_kept_in_fp32():
    """1 - decay = 0.001 of a bf16 number is rounded away: its average would stand still."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    accel = accelerated(model, ema=0.999)
    accel.average.ramp = False
    model.weight.data.fill_(1.0)
    accel.average.reseed()
    model.weight.data.fill_(2.0)
    for _ in range(700):
        accel.average.update()
    expected = 2 - 0.999**700
    assert accel.weights()["weight"].float() == pytest.approx(expected, rel=1e-2)
    assert accel.average.state_dict()["shadow"]["weight"].flatten()[0].item() == pytest.approx(expected, rel=1e-3)
    with accel.validation():
        pass
    assert accel.average.state_dict()["shadow"]["weight"].flatten()[0].item() == pytest.approx(expected, rel=1e-3)
    assert model.weight.eq(2.0).all()


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


def held_lazily():
    model = net()
    return {"model": model, "optimizer": torch.optim.SGD([*model.parameters(), *lazy().parameters()], lr=0.1)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: {"model": lazy()}, "model=Sequential: 0.weight has no shape yet"),
        (held_lazily, "optimizer=SGD: holds a parameter that has no shape yet"),
        (lambda: {"model": (m := net()), "optimizer": torch.optim.LBFGS(m.parameters())}, "LBFGS: .* needs a closure"),
        (
            lambda: {"model": net(), "schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "schedule=ReduceLROnPlateau: its step needs metrics",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_at_construction(given, told):
    arguments = given()
    with pytest.raises(AccelError, match=told):
        accelerated(arguments.pop("model"), **arguments)


def test_tied_weights_and_groups_with_rates_of_their_own_equal_the_plain_loop():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        model[2].weight = model[0].weight
        groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[3].parameters()}]
        groups.append({"params": [model[2].bias], "weight_decay": 0.1})
        return model, torch.optim.SGD(groups, lr=0.1)

    (model, ours), (right, optimizer) = make(), make()
    x, y = data()
    accel = accelerated(model, ours, accumulate=2, clip_norm=0.2)
    for k in (slice(0, 8), slice(8, 24)):
        step(accel, x[k], y[k])
    F.cross_entropy(right(x), y).backward()
    nn.utils.clip_grad_norm_(right.parameters(), 0.2)
    optimizer.step()
    assert off(model, right) < 1e-6


# -- batches -----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "images labels")


@dataclass(frozen=True)
class Item:
    images: torch.Tensor
    name: str


class Graph:
    """What has a `.to` of its own, as PyG's batches and tokenizers' encodings have."""

    def to(self, device):
        self.where = device
        return self


def test_any_nesting_of_tensors_is_moved_and_keeps_its_kind():
    accel = accelerated(net())
    x = torch.zeros(4, 8)
    batch = {
        "pair": Pair(x, [x, "text"]),
        "ordered": OrderedDict(a=x),
        "own": UserDict(a=x),
        "item": Item(x, "name"),
        "graph": Graph(),
        "packed": nn.utils.rnn.pack_sequence([x[0], x[1]]),
        "count": 3,
    }
    marked = mapped(batch, lambda tensor: tensor + 1)
    assert marked["pair"].labels[0].sum() == marked["item"].images.sum() == marked["own"]["a"].sum() == 32
    assert batch["pair"].images.sum() == batch["own"]["a"].sum() == batch["item"].images.sum() == 0
    with accel.forward(batch) as moved:
        assert {name: type(value) for name, value in moved.items()} == {n: type(v) for n, v in batch.items()}
        assert moved["graph"].where == accel.device
        assert moved["pair"].labels[1] == "text"
    assert samples(batch) == 4


def test_dict_and_list_batches_train_as_in_a_plain_loop():
    model, right = net(), net()
    x, y = data()
    accel = accelerated(model, accumulate=2)
    for k in (slice(0, 8), slice(8, 24)):
        with accel.forward({"x": x[k], "rest": [y[k], "name"]}) as batch:
            loss = F.cross_entropy(model(batch["x"]), batch["rest"][0])
        accel.backward(loss, weight=len(x[k]))
    F.cross_entropy(right(x), y).backward()
    sgd(right).step()
    assert accel.session.series.samples == 24
    assert off(model, right) < 1e-6


def test_averaged_model_and_swa_beside_the_plug_are_the_bare_models():
    model = net()
    x, y = data()
    accel = accelerated(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    copied = copy.deepcopy(model)
    step(accel, x, y)
    average.update_parameters(model)
    assert off(average.module, model) == 0
    assert list(copied.state_dict()) == list(model.state_dict())
