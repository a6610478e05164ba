"""Micro-batches through the weighted criteria against one big batch through the host's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integrations.ultralytics.loss_scaling import ALL, ONE_TO_MANY, ONE_TO_ONE
from tests import reference
from tests.ultralytics.accumulated import COUNTS, FP32, Accumulated, batch, check, freeze, micro_batches
from tests.ultralytics.spy import bare, joined, loss, network


@pytest.mark.parametrize("case", COUNTS)
def test_detection_equals_the_big_batch(case: str, models: Callable[[str], Path], dtype: torch.dtype) -> None:
    size, counts = COUNTS[case]
    ours = check(network(models("detect")), micro_batches(counts), size, dtype)
    assert ours.session.report.window.exact
    assert ours.session.report.window.approximate_terms == []


@pytest.mark.parametrize("head", ["end2end", "obb", "classify"])
@pytest.mark.parametrize("case", ["K=1", "K=4", "one micro-batch without objects", "ragged tail", "many windows"])
def test_other_exact_losses(head: str, case: str, models: Callable[[str], Path], dtype: torch.dtype) -> None:
    size, counts = COUNTS[case]
    ours = check(network(models(head)), micro_batches(counts, head), size, dtype)
    assert ours.session.report.window.exact


def test_the_host_s_own_sum_is_far_from_the_big_batch(models: Callable[[str], Path]) -> None:
    """What normalise=exact mends; without it this file would test nothing."""
    size, counts = COUNTS["one micro-batch without objects"]
    model, batches = network(models("detect")), micro_batches(counts)
    right = reference.gradients(freeze(bare(model)), joined(batches), loss)
    ours = Accumulated(model, size, normalise="host").feed(batches)
    assert reference.difference(ours.windows[0], right) > 0.1
    assert ours.session.report.window.approximate_terms == ["all: normalise=host"]
    plain = freeze(bare(model))
    for one in batches:
        loss(plain, one).backward()
    sums = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert reference.difference(ours.windows[0], sums) < FP32


def test_end_to_end_groups_are_disjoint_and_whole(models: Callable[[str], Path]) -> None:
    model = network(models("end2end"))
    ours = Accumulated(model, 2)
    groups = ours.losses.groups
    assert set(groups) == {ONE_TO_ONE, ONE_TO_MANY}
    assert all(groups.values())
    assert {id(p) for g in groups.values() for p in g} == {id(p) for p in model.parameters()}
    assert sum(len(g) for g in groups.values()) == len(list(model.parameters()))
    assert not ours.losses.crosses_epochs  # its criterion changes its own weights every epoch


def test_the_branches_of_an_end_to_end_head_have_factors_of_their_own(models: Callable[[str], Path]) -> None:
    """One factor for both would be wrong: the normalisers of the two branches differ."""
    ours = Accumulated(network(models("end2end")), 2)
    for one in micro_batches([[2, 3], [1, 9]]):
        ours.micro_batch(2)
        loss(ours.model, one).backward()
    factors = ours.session.window.factors()
    assert set(factors) == {ONE_TO_ONE, ONE_TO_MANY}
    assert float(factors[ONE_TO_ONE]) != float(factors[ONE_TO_MANY])


APPROXIMATE = {
    "segment": ["v8SegmentationLoss: seg_loss, sem_loss"],
    "pose": ["v8PoseLoss: pose_loss, kobj_loss"],
    "rtdetr": ["RT-DETR: denoising queries depend on the micro-batch"],
}


@pytest.mark.parametrize("head", APPROXIMATE)
def test_what_cannot_be_exact_is_named(head: str, models: Callable[[str], Path]) -> None:
    ours = Accumulated(network(models(head)), 2)
    assert ours.session.report.window.approximate_terms == APPROXIMATE[head]
    assert ours.session.report.window.exact is False


@pytest.mark.parametrize("head", ["segment", "pose"])
def test_detection_terms_stay_exact_beside_approximate_ones(head: str, models: Callable[[str], Path]) -> None:
    """The other terms' gains at zero: what is left is the detection loss, and equals the big batch."""
    model = network(models(head))
    own = {"segment": (), "pose": ("pose", "kobj")}[head]
    for name in own:
        setattr(model.args, name, 0.0)
    batches = micro_batches([[2, 1, 3, 1], [0, 0, 0, 0], [5, 5, 4, 5], [1, 0, 0, 0]], head)
    right = reference.gradients(freeze(bare(model)), joined(batches), _detection_terms)
    ours = Accumulated(model, 4)
    for one in batches:
        ours.micro_batch(len(one["img"]))
        _detection_terms(model, one).backward()
    ours.session.close()
    assert reference.difference(ours.windows[0], right) <= FP32


def _detection_terms(model: nn.Module, one: dict[str, Any]) -> Tensor:
    value, items = model.loss({**one})  # type: ignore[operator]
    kept = [v for v, name in zip(value, items, strict=True) if name in ("box_loss", "cls_loss", "dfl_loss")]
    total: Tensor = torch.stack(kept).sum()
    return total


@pytest.mark.parametrize("head", ["segment", "pose"])
def test_an_approximate_term_keeps_the_host_s_size(head: str, models: Callable[[str], Path]) -> None:
    """Equal micro-batches: every rule agrees, so that the terms without a rule must come out right as well."""
    model = network(models(head))
    one = batch(3, [2, 1, 2], 0, head)  # 12 images: no power of two, which the window would move into the weights
    right = reference.gradients(freeze(bare(model)), joined([one] * 4), loss)
    ours = Accumulated(model, 4).feed([one] * 12)
    for window in ours.windows:
        assert reference.difference(window, right) <= 1e-5


def test_windows_of_one_are_bit_for_bit_the_host_s(models: Callable[[str], Path]) -> None:
    model = network(models("detect"))
    one = batch(4, [2, 1, 3, 1])
    right = reference.gradients(freeze(bare(model)), one, loss)
    ours = Accumulated(model, 1).feed([one])
    assert all(torch.equal(ours.windows[0][n], right[n]) for n in right)


def test_undo_gives_the_criterion_back(models: Callable[[str], Path]) -> None:
    for head in ("detect", "end2end", "classify", "rtdetr"):
        model = network(models(head))
        ours = Accumulated(model, 2)
        assert ours.patches.names()
        ours.patches.undo()
        criteria = [model.criterion, *(getattr(model.criterion, n, None) for n in (ONE_TO_ONE, ONE_TO_MANY))]
        for criterion in criteria:
            assert "loss" not in vars(criterion or object)
            assert isinstance(getattr(criterion, "assigner", nn.Identity()), nn.Module)
        assert "loss" not in vars(model)


def test_no_weight_is_put_on_a_loss_outside_training(models: Callable[[str], Path]) -> None:
    """Validation of the live model asks for its loss, too: it is shown to the user, and stays the host's."""
    model = network(models("detect"))
    one = batch(4, [2, 1, 3, 1])
    right = bare(model)
    ours = Accumulated(model, 4)
    with torch.no_grad():
        assert torch.equal(model.loss(one)[0], freeze(right).loss(one)[0])  # type: ignore[operator]
    assert ours.session.window._totals.get(ALL) is None
