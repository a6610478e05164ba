"""Criteria of a user's own: exact where their terms are known, and of the host's size where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from ultralytics.utils.loss import E2EDetectLoss, v8DetectionLoss
from ultralytics.utils.tal import TaskAlignedAssigner

from tests import reference
from tests.ultralytics.accumulated import COUNTS, FP32, Accumulated, OneMore, batch, check, freeze, micro_batches, own
from tests.ultralytics.spy import bare, joined, loss, network, off_the_big_batch


class Summed(v8DetectionLoss):
    """One number, as earlier releases of the host returned."""

    def loss(self, preds: Any, batch: Any) -> Any:
        value, items = super().loss(preds, batch)
        return value.sum(), items


class InFront(OneMore):
    first = True


class SummedWithMore(OneMore):
    def loss(self, preds: Any, batch: Any) -> Any:
        value, items = super().loss(preds, batch)
        return value.sum(), items


@pytest.mark.parametrize("case", ["K=4", "one micro-batch without objects", "ragged tail"])
def test_an_own_criterion_that_returns_one_number_equals_the_big_batch(
    case: str, models: Callable[[str], Path], dtype: torch.dtype
) -> None:
    size, counts = COUNTS[case]
    ours = check(own(models, Summed), micro_batches(counts), size, dtype)
    assert ours.session.report.window.approximate_terms == ["Summed: its own terms"]


def host_sum(model: nn.Module, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The gradients that the host alone accumulates."""
    for one in batches:
        loss(model, one).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_17782_one_more_term_keeps_the_host_s_size_and_the_host_s_terms_are_exact(
    models: Callable[[str], Path],
) -> None:
    """The term is a sum over images, so that the big batch's is the host's sum. Equal micro-batches."""
    model, one = own(models, OneMore), batch(3, [2, 1, 2])
    right = reference.gradients(freeze(bare(model)), joined([one] * 4), loss)
    ours = Accumulated(model, 4).feed([one] * 12)
    for window in ours.windows:
        assert reference.difference(window, right) <= 1e-5
    assert ours.session.report.window.approximate_terms == ["OneMore: its own terms"]


@pytest.mark.parametrize("criterion", [InFront, SummedWithMore])
def test_what_cannot_be_told_apart_keeps_the_host_s_size(criterion: Any, models: Callable[[str], Path]) -> None:
    model, one = own(models, criterion), batch(3, [2, 1, 2])
    right = host_sum(freeze(bare(model)), [one] * 4)
    for window in Accumulated(model, 4).feed([one] * 12).windows:
        assert reference.difference(window, right) <= 1e-5


def test_what_is_added_to_the_loss_of_the_model_keeps_the_host_s_size(models: Callable[[str], Path]) -> None:
    """Distillation that wraps `model.loss`."""
    model, one = network(models("detect")), batch(3, [2, 1, 2])
    name, head = next((n, p) for n, p in model.named_parameters() if n.endswith("cv2.0.2.bias"))
    big = reference.gradients(freeze(bare(model)), joined([one] * 4), loss)
    big[name] = big[name] + 4 * 2 * 10.0 * head.detach()  # the host's sum of four micro-batches
    ours = Accumulated(model, 4)
    through: Any = model.loss

    def added(batch: dict[str, Any]) -> Any:
        value, items = through(batch)
        return value.sum() + 10.0 * head.pow(2).sum(), items

    model.loss = added  # type: ignore[assignment]
    assert ours.losses.around.stay()
    for window in ours.feed([one] * 12).windows:
        assert reference.difference(window, big) <= 1e-5
    named = ["loss: what is added to the criterion's keeps the host's size"]
    assert ours.session.report.window.approximate_terms == named


@pytest.mark.parametrize("other", [None, Summed])
def test_a_criterion_exchanged_between_windows_is_weighted_again(other: Any, models: Callable[[str], Path]) -> None:
    size, counts = COUNTS["one micro-batch without objects"]
    batches = micro_batches(counts)
    model: Any = network(models("detect"))
    right = freeze(bare(model))
    ours = Accumulated(model, size)
    model.criterion = other and other(model)
    ours.losses.refresh()
    ours.feed(batches)
    assert off_the_big_batch(ours.windows[0], right, batches) <= FP32


class Assigning(v8DetectionLoss):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.assigner = TaskAlignedAssigner(topk=3, num_classes=self.nc, alpha=0.5, beta=6.0)


def test_an_assigner_that_a_callback_exchanges_is_the_one_whose_targets_count(models: Callable[[str], Path]) -> None:
    size, counts = COUNTS["one micro-batch without objects"]
    batches = micro_batches(counts)
    model = own(models, Assigning)
    right = freeze(bare(model))
    model.criterion = v8DetectionLoss(model)
    ours = Accumulated(model, size)
    model.criterion.assigner = Assigning(model).assigner
    ours.feed(batches)
    assert off_the_big_batch(ours.windows[0], right, batches) <= FP32


@pytest.mark.parametrize("head", ["detect", "end2end", "classify"])
def test_what_is_asked_beside_a_micro_batch_is_the_host_s_and_counts_nothing(
    head: str, models: Callable[[str], Path]
) -> None:
    size, counts = COUNTS["K=2"]
    batches = micro_batches(counts, head if head == "classify" else "detect")
    other = batch(1, [9], seed=7, task=head)
    model = network(models(head))
    right, alone = freeze(bare(model)), freeze(bare(model))
    ours = Accumulated(model, size)
    for one in batches:
        assert float(loss(model, other)) == pytest.approx(float(loss(alone, other)))
        ours.micro_batch(len(one["img"]))
        loss(model, one).backward()
        assert float(loss(model, other)) == pytest.approx(float(loss(alone, other)))
        ours.session.backward_done()
    assert off_the_big_batch(ours.windows[0], right, batches) <= FP32


@pytest.mark.parametrize("older", [False, True], ids=["this host", "an older host"])
def test_plans_are_tried_with_the_host_s_criteria_and_not_with_a_user_s(
    older: bool, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """YOLOv10's head. An older host's criteria have no `loss`: a function is held in the place of each branch."""
    if older:
        monkeypatch.delattr(v8DetectionLoss, "loss")
    measured = []
    for branch in (v8DetectionLoss, Summed):
        model: Any = network(models("end2end"))
        model.criterion = E2EDetectLoss(model)
        model.criterion.one2one = branch(model)
        ours = Accumulated(model, 2)
        assert (type(model.criterion.one2many) is v8DetectionLoss) is not older
        measured.append(ours.session.measured)
    assert measured == [False, True]
