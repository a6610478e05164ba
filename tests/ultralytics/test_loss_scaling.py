"""Micro-batches through the weighted criteria against one big batch through the host's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from ultralytics.utils.loss import v8DetectionLoss

from integrations.patches import Patches
from integrations.ultralytics.loss_scaling import ALL, ONE_TO_MANY, ONE_TO_ONE, Losses, loss_groups
from plugins.config import AccelConfig
from plugins.core.session import RunSpec, Session
from tests import reference
from tests.ultralytics.conftest import BATCHNORM, bare, joined, loss, network, off_the_big_batch

CPU = torch.device("cpu")
FP32, FP64 = 1e-6, 1e-12


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The host's criteria build their tensors in the default dtype."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def limit(dtype: torch.dtype) -> float:
    return FP32 if dtype == torch.float32 else FP64


def batch(images: int, objects: Sequence[int], seed: int = 0, task: str = "detect") -> dict[str, Any]:
    """`images` noise images of 64 px, `objects[i]` boxes in image i."""
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.get_default_dtype()
    count = sum(objects)
    centre = torch.rand(count, 2, generator=draw, dtype=dtype) * 0.5 + 0.25
    size = torch.rand(count, 2, generator=draw, dtype=dtype) * 0.3 + 0.15
    found = {
        "img": torch.rand(images, 3, 64, 64, generator=draw, dtype=dtype),
        "cls": torch.randint(0, 3, (count, 1), generator=draw).to(dtype),
        "bboxes": torch.cat([centre, size], 1),
        "batch_idx": torch.repeat_interleave(torch.arange(images), torch.tensor(objects)).to(dtype),
    }
    if task == "obb":
        found["bboxes"] = torch.cat([found["bboxes"], torch.rand(count, 1, generator=draw, dtype=dtype)], 1)
    if task == "classify":
        found["cls"] = torch.randint(0, 3, (images,), generator=draw)
    if task == "pose":
        found["keypoints"] = torch.cat([centre, torch.full((count, 1), 2.0)], 1).view(count, 1, 3)
    if task == "segment":
        found["masks"] = torch.zeros(images, 16, 16)
        for row in range(count):  # overlapping masks: object n of an image paints n
            image = int(found["batch_idx"][row])
            number = int((found["batch_idx"][: row + 1] == image).sum())
            x, y = (centre[row] * 16).long().tolist()
            found["masks"][image, max(y - 2, 0) : y + 2, max(x - 2, 0) : x + 2] = number
    return found


def micro_batches(counts: Sequence[Sequence[int]], task: str = "detect") -> list[dict[str, Any]]:
    return [batch(len(objects), objects, seed, task) for seed, objects in enumerate(counts)]


def freeze(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, BATCHNORM):
            module.eval()
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class Accumulated:
    """Runs micro-batches through a session, and keeps the gradients of every window."""

    def __init__(self, model: nn.Module, size: int, **options: Any) -> None:
        self.model = freeze(model)
        config = AccelConfig(accumulate=size, batchnorm="freeze", clip_norm="off", **options)
        self.patches = Patches()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.windows: list[dict[str, Tensor]] = []
        step = self.optimizer.step

        def spied(*args: Any, **kwargs: Any) -> Any:
            self.windows.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            return step(*args, **kwargs)

        self.optimizer.step = spied  # type: ignore[method-assign]
        groups = loss_groups(model, config.normalise)
        self.session = Session(
            RunSpec(config, "ultralytics", model, self.optimizer, CPU, 4, size, groups=groups, say=lambda _: None)
        )
        self.losses = Losses(model, self.session, self.patches, groups)
        freeze(model)

    def feed(self, batches: list[dict[str, Any]]) -> Accumulated:
        for one in batches:
            self.session.micro_batch(len(one["img"]))
            loss(self.model, one).backward()
            self.session.backward_done()
        self.session.close()
        self.patches.undo()
        self.session.end()
        return self


def check(model: nn.Module, batches: list[dict[str, Any]], size: int, dtype: torch.dtype) -> Accumulated:
    right_model = freeze(bare(model))
    ours = Accumulated(model, size).feed(batches)
    starts = range(0, len(batches), size)
    assert len(ours.windows) == len(starts)
    for window, start in zip(ours.windows, starts, strict=True):
        assert off_the_big_batch(window, right_model, batches[start : start + size], limit(dtype)) <= limit(dtype)
    return ours


COUNTS = {
    "K=1": (1, [[2, 1, 3, 1]]),
    "K=2": (2, [[2, 1, 3, 1], [1, 1, 1, 2]]),
    "K=4": (4, [[2, 1, 3, 1], [1, 1, 1, 2], [5, 5, 4, 5], [1, 0, 0, 0]]),
    "one micro-batch without objects": (4, [[2, 1, 3, 1], [0, 0, 0, 0], [5, 5, 4, 5], [1, 0, 0, 0]]),
    "no object at all": (2, [[0, 0], [0, 0]]),
    "under one target": (2, [[0, 0, 0], [0, 0, 0, 0]]),
    "ragged micro-batch": (2, [[2, 1, 3, 1], [3]]),
    "ragged tail": (4, [[2, 1], [0, 0], [4, 4], [1, 2], [3, 1]]),
    "first window empty, second not": (2, [[0, 0], [0, 0], [7, 7], [1, 0]]),
    "many windows": (3, [[1, 1], [6, 6], [0, 0], [0, 9], [2, 2], [1, 0], [4, 1]]),
}


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
        ours.session.micro_batch(2)
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
        ours.session.micro_batch(len(one["img"]))
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


# -- a user's own ---------------------------------------------------------------------------------------------------


class Summed(v8DetectionLoss):
    """One number, as earlier releases of the host returned."""

    def loss(self, preds: Any, batch: Any) -> Any:
        value, items = super().loss(preds, batch)
        return value.sum(), items


class OneMore(v8DetectionLoss):
    """17782: one more term, which `loss_names` does not name."""

    first = False

    def loss(self, preds: Any, batch: Any) -> Any:
        value, items = super().loss(preds, batch)
        more = 1e-5 * preds["boxes"].pow(2).sum()[None]
        return torch.cat([more, value] if self.first else [value, more]), items


class InFront(OneMore):
    first = True


class SummedWithMore(OneMore):
    def loss(self, preds: Any, batch: Any) -> Any:
        value, items = super().loss(preds, batch)
        return value.sum(), items


def own(models: Callable[[str], Path], criterion: Any) -> Any:
    model: Any = network(models("detect"))
    model.init_criterion = lambda: criterion(model)
    return model


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
