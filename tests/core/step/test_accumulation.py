from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plugins.core.step.accumulation import Term, Window, scale_
from tests import reference
from tests.core.tiny import (
    FORMS,
    Batch,
    Net,
    batch_mean_loss,
    batch_mean_of,
    batches,
    count,
    joined,
    mean_loss,
    mean_of,
    mlp,
)

BOUND = {torch.float32: 1e-6, torch.float64: 1e-12}
TERMS = {
    "mean": lambda batch: Term.mean(count(batch)),
    "batch_mean": lambda batch: Term.batch_mean(len(batch.x), batch.s.sum()),
}
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.float64])


def accumulate(window: Window, model: nn.Module, parts: list[Batch], form: str) -> dict[str, torch.Tensor]:
    """The gradients of one window, by the pure functions alone."""
    model.zero_grad()
    loss = FORMS[form][0]
    for part in parts:
        window.count(len(part.x))
        (loss(model, part) * window.weigh({"": TERMS[form](part)})[""]).backward()
    for factor in window.factors().values():
        scale_([p.grad for p in model.parameters() if p.grad is not None], factor)
    window.close()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", FORMS)
@given(sizes=sizes, seed=st.integers(0, 99), dtype=dtypes, empty=st.sets(st.integers(0, 3)))
def test_a_window_has_the_gradient_of_the_big_batch(
    form: str, sizes: list[int], seed: int, dtype: torch.dtype, empty: set[int]
) -> None:
    model, parts = mlp(seed, dtype), batches(seed, sizes, dtype, empty)
    right = reference.gradients(model, joined(parts), FORMS[form][0])
    ours = accumulate(Window(size=len(sizes)), model, parts, form)
    assert reference.difference(ours, right) <= BOUND[dtype]


@pytest.mark.parametrize("form", FORMS)
@given(k=st.sampled_from([1, 2, 4]), n=st.integers(1, 9), seed=st.integers(0, 99), dtype=dtypes)
def test_every_window_of_a_run_is_exact_and_so_is_the_ragged_tail(
    form: str, k: int, n: int, seed: int, dtype: torch.dtype
) -> None:
    """The power of two that moves into the weights comes from the window before: it must not show."""
    model, window = mlp(seed, dtype), Window(size=k)
    parts = batches(seed, [1 + (seed + i) % 4 for i in range(n)], dtype, empty={i for i in range(n) if i % 3 == 1})
    for at in range(0, n, k):
        right = reference.gradients(model, joined(parts[at : at + k]), FORMS[form][0])
        assert reference.difference(accumulate(window, model, parts[at : at + k], form), right) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
def test_a_window_without_any_target(dtype: torch.dtype) -> None:
    model, parts = mlp(1, dtype), batches(1, [2, 3], dtype, empty=[0, 1])
    right = reference.gradients(model, joined(parts), batch_mean_loss)
    assert reference.difference(accumulate(Window(2), model, parts, "batch_mean"), right) <= BOUND[dtype]
    assert sum(float(g.abs().sum()) for g in right.values()) > 0
    still = accumulate(Window(2), model, parts, "mean")
    assert all(float(g.abs().sum()) == 0 for g in still.values())


@given(sizes=sizes, seed=st.integers(0, 99), dtype=dtypes, empty=st.sets(st.integers(0, 3)))
def test_two_groups_of_disjoint_parameters_keep_their_own_count(
    sizes: list[int], seed: int, dtype: torch.dtype, empty: set[int]
) -> None:
    torch.manual_seed(seed)
    model, parts, window = Net().to(dtype), batches(seed, sizes, dtype, empty), Window(len(sizes))

    def losses(net: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = net(batch.x)
        return batch_mean_of(a, batch), mean_of(b, batch)

    right = reference.gradients(model, joined(parts), lambda net, batch: sum(losses(net, batch)))
    for part in parts:
        window.count(len(part.x))
        weights = window.weigh({"many": TERMS["batch_mean"](part), "one": TERMS["mean"](part)})
        many, one = losses(model, part)
        (many * weights["many"] + one * weights["one"]).backward()
    groups = model.groups()
    for name, factor in window.factors().items():
        scale_([p.grad for p in groups[name]], factor)
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert reference.difference(ours, right) <= BOUND[dtype]


def test_one_micro_batch_is_the_big_batch_bit_for_bit() -> None:
    model, (part,) = mlp(2), batches(2, [4])
    right = reference.gradients(model, part, batch_mean_loss)
    ours = accumulate(Window(1), model, [part], "batch_mean")
    assert all(torch.equal(ours[name], right[name]) for name in right)


def test_host_normalisation_weighs_nothing() -> None:
    window = Window(4, exact=False)
    window.count(2)
    assert window.weigh({"": Term.mean(7.0)}) == {"": 1.0}
    assert window.factors() == {}


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_weights_are_numbers_or_tensors_as_the_counts_are(kind: Any) -> None:
    window = Window(2)
    for targets in (3.0, 5.0):
        window.count(2)
        weight = window.weigh({"": Term.batch_mean(2, kind(targets))})[""]
        assert isinstance(weight, torch.Tensor) == (kind is not float)
    assert isinstance(window.factors()[""], torch.Tensor) == (kind is not float)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_that_come_in_half_precision_are_summed_in_single(dtype: torch.dtype) -> None:
    """Under autocast target scores are halves: 2049 is no float16, and 70000 overflows it."""
    window = Window(64)
    given_ = torch.tensor(1030.0).to(dtype)
    for _ in range(64):
        window.count(3)
        weight = window.weigh({"": Term.batch_mean(3, given_)})[""]
    power = window.state_dict()["power"][""]
    assert float(weight) / float(power) == pytest.approx(float(given_) / 3, rel=1e-6)
    assert float(window.factors()[""]) * float(power) == pytest.approx(192 / (64 * float(given_)), rel=1e-6)


def test_weights_stay_near_one_so_that_half_gradients_stay_in_range() -> None:
    window = Window(4)
    for _ in range(3):
        for _ in range(4):
            window.count(16)
            weight = window.weigh({"": Term.mean(6000.0)})[""]
            assert 1 / 8 <= float(weight) <= 1
        assert 0.5 <= float(window.factors()[""]) <= 2
        window.close()


def test_a_term_without_a_rule_keeps_the_size_that_its_host_gave_it() -> None:
    """Equal micro-batches: weight of the term x factor of the close = 1."""
    window = Window(4)
    for _ in range(2):
        for _ in range(4):
            window.count(2)
            window.weigh({"": Term.batch_mean(2, 10.0)})
            share = window.share("")
        assert float(share) * float(window.factors()[""]) == pytest.approx(1.0, rel=1e-6)
        window.close()
    assert Window(1).share("") == 1.0


def test_the_host_decides_when_a_window_closes() -> None:
    window = Window(None)
    assert window.empty
    assert not window.full
    window.close(expected=3)
    window.count(1)
    assert window.expected == 3
    assert not window.full
    fixed = Window(2)
    fixed.count(1)
    fixed.count(1)
    assert fixed.full
    fixed.close(expected=7)
    assert fixed.expected == 2
    assert fixed.empty


@given(split=st.integers(1, 3), seed=st.integers(0, 20))
def test_a_window_saved_in_its_middle_goes_on_bit_for_bit(split: int, seed: int) -> None:
    parts = batches(seed, [2, 3, 1, 4])
    straight, first = Window(4), Window(4)

    def add(window: Window, part: Batch) -> Any:
        window.count(len(part.x))
        return window.weigh({"": TERMS["batch_mean"](part)})[""]

    for window in (straight, first):  # one whole window before, so that the power is not its first
        for part in parts:
            add(window, part)
        window.factors()
        window.close()
    weights = [add(straight, part) for part in parts]
    ours = [add(first, part) for part in parts[:split]]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = Window(4)
    again.load_state_dict(torch.load(file, weights_only=True))
    ours += [add(again, part) for part in parts[split:]]
    assert [float(w) for w in ours] == [float(w) for w in weights]
    assert float(again.factors()[""]) == float(straight.factors()[""])
    assert (again.micro_batches, again.samples) == (4, 10)


def test_scale_takes_a_number_or_a_tensor_of_another_precision() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    scale_(tensors, 2.0)
    scale_(tensors, torch.tensor(0.25, dtype=torch.float64))
    assert all(bool((t == 0.5).all()) for t in tensors)
    scale_([], 2.0)


def test_mean_loss_of_nothing_is_zero() -> None:
    """The reference's own corner, on which the empty windows above rest."""
    (part,) = batches(0, [3], empty=[0])
    assert mean_loss(mlp(), part).item() == 0.0
