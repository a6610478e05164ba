"""Micro-batches of noise images through a session, and the big batch beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.utils.loss import v8DetectionLoss

from integrations.patches import Patches
from integrations.ultralytics.loss_scaling import Losses, loss_groups
from plugins.config import AccelConfig
from plugins.core.session import RunSpec, Session
from tests.ultralytics.conftest import BATCHNORM
from tests.ultralytics.spy import bare, loss, network, off_the_big_batch

CPU = torch.device("cpu")
FP32, FP64 = 1e-6, 1e-12


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

    def micro_batch(self, images: int) -> None:
        """One comes, and its forward is next."""
        self.session.micro_batch(images)
        self.losses.arm()

    def feed(self, batches: list[dict[str, Any]]) -> Accumulated:
        for one in batches:
            self.micro_batch(len(one["img"]))
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


class OneMore(v8DetectionLoss):
    """17782: one more term, which `loss_names` does not name."""

    first = False

    def loss(self, preds: Any, batch: Any) -> Any:
        value, items = super().loss(preds, batch)
        more = 1e-5 * preds["boxes"].pow(2).sum()[None]
        return torch.cat([more, value] if self.first else [value, more]), items


def own(models: Callable[[str], Path], criterion: Any) -> Any:
    model: Any = network(models("detect"))
    model.init_criterion = lambda: criterion(model)
    return model
