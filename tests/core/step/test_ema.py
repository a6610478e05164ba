from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

from plugins.core.step.ema import EMA
from tests.core.tiny import batches, mlp, same, snapshot


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    model.train()
    model(batches(0, [4], next(model.parameters()).dtype)[0].x)  # BatchNorm's statistics and counter


@pytest.mark.parametrize("ramp", [False, True])
def test_the_average_is_the_formula(ramp: bool) -> None:
    model = mlp(dtype=torch.float64, norm=True)
    shadow, right = EMA(model, 0.7, ramp), snapshot(model)
    for n in range(1, 30):
        move(model)
        shadow.update()
        decay = min(0.7, (1 + n) / (10 + n)) if ramp else 0.7
        for name, live in model.state_dict().items():
            right[name] = decay * right[name] + (1 - decay) * live if live.is_floating_point() else live.clone()
    ours = shadow.state_dict()["shadow"]
    assert ours.keys() == right.keys()
    assert all(torch.allclose(ours[name], right[name], rtol=1e-12, atol=1e-12) for name in right)
    assert ours["norm.num_batches_tracked"].dtype == torch.int64
    assert int(ours["norm.num_batches_tracked"]) == 29
    assert shadow.updates == 29


def test_swapped_puts_the_average_in_and_the_live_weights_back_also_after_an_error() -> None:
    model = mlp(norm=True)
    shadow = EMA(model, 0.5, ramp=False)
    move(model)
    shadow.update()
    live, average = snapshot(model), {n: t.clone() for n, t in shadow.state_dict()["shadow"].items()}
    storages = [p.data_ptr() for p in model.parameters()]
    with contextlib.suppress(KeyError), shadow.swapped():
        assert same(snapshot(model), average)
        assert [p.data_ptr() for p in model.parameters()] == storages
        raise KeyError
    assert same(snapshot(model), live)
    assert same(shadow.state_dict()["shadow"], average)


def test_a_tied_parameter_is_averaged_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    shadow = EMA(model, 0.5, ramp=False)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1
    shadow.update()
    assert list(shadow.state_dict()["shadow"]) == ["0.weight"]
    assert torch.allclose(shadow.state_dict()["shadow"]["0.weight"], before + 0.5)
    with shadow.swapped():
        assert torch.allclose(model[1].weight, before + 0.5)
    assert torch.allclose(model[1].weight, before + 1)


def test_saved_and_loaded_bit_for_bit() -> None:
    model = mlp(norm=True)
    shadow = EMA(model, 0.9)
    for _ in range(3):
        move(model)
        shadow.update()
    file = io.BytesIO()
    torch.save(shadow.state_dict(), file)
    file.seek(0)
    again = EMA(mlp(5, norm=True), 0.9)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert same(again.state_dict(), shadow.state_dict())


def test_reseed_starts_from_the_live_weights() -> None:
    model = mlp()
    shadow = EMA(model, 0.9)
    move(model)
    shadow.reseed()
    assert same(shadow.state_dict()["shadow"], snapshot(model))
    move(model)
    assert not same(shadow.state_dict()["shadow"], snapshot(model))


def test_swapped_inside_swapped_changes_nothing_and_unswapped_gives_the_live_weights() -> None:
    model = nn.Linear(2, 1)
    average = EMA(model, 0.5, ramp=False)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update()
    live, shadow = model.weight.detach().clone(), average.state_dict()["shadow"]["weight"].clone()
    assert not torch.equal(live, shadow)
    with average.swapped():
        with average.swapped():
            assert torch.equal(model.weight, shadow)
        assert torch.equal(model.weight, shadow)
        with average.unswapped():
            assert torch.equal(model.weight, live)
            assert torch.equal(average.state_dict()["shadow"]["weight"], shadow)
        assert torch.equal(model.weight, shadow)
    assert torch.equal(model.weight, live)


class Moving(nn.Module):
    """Puts another tensor in its buffer's place, as a running mean written out does; some cannot be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("lowest", torch.tensor(float("inf")))
        self.register_buffer("angles", torch.ones(2).expand(4, 2), persistent=False)
        self.register_buffer("seen", torch.zeros(0, 2))
        self.register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)
        self.register_buffer("rows", torch.eye(2).to_sparse_csr(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.lowest = torch.minimum(self.lowest, x.min())
        self.seen = torch.cat([self.seen, x[:1]])
        return self.layer(x * self.angles[: len(x)])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffers_that_are_exchanged_grow_or_are_infinite_do_not_harm_the_average() -> None:
    model = Moving()
    shadow = EMA(model, 0.5, ramp=False)
    mean = average = torch.zeros(2)
    for x in torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(1)):
        model(x)
        shadow.update()
        mean = 0.5 * mean + 0.5 * x.mean(0)
        average = 0.5 * average + 0.5 * mean
    live = snapshot(model)
    with shadow.swapped():
        assert torch.allclose(model.mean, average)
        assert all(torch.equal(model.state_dict()[name], live[name]) for name in ("mask", "lowest", "seen"))
    assert same(snapshot(model), live)
    assert torch.equal(model.mean, mean)


def test_a_layer_that_comes_later_is_averaged_too() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].later = nn.ModuleList()
    shadow = EMA(model, 0.5, ramp=False)
    model[1] = nn.Linear(3, 2)
    model.append(nn.Linear(2, 1))
    shadow.update()
    model[0].later.append(nn.Linear(2, 1))  # into what was empty
    shadow.update()
    model[0].register_buffer("scale", torch.ones(1))
    shadow.update()
    new = [model[1].weight, model[2].weight, model[0].later[0].weight, model[0].scale]
    before = [tensor.detach().clone() for tensor in new]
    with torch.no_grad():
        for tensor in new:
            tensor += 1
    shadow.update()
    with shadow.swapped():
        assert all(torch.allclose(tensor, old + 0.5) for tensor, old in zip(new, before, strict=True))
    assert all(torch.equal(tensor, old + 1) for tensor, old in zip(new, before, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_torchscript_module_is_averaged() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    shadow = EMA(model, 0.5, ramp=False)
    weight = dict(model.named_parameters())["0.weight"]
    before = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    shadow.update()
    with shadow.swapped():
        assert torch.allclose(weight, before + 0.5)
    assert torch.equal(weight, before + 1)
