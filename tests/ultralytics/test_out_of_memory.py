"""Memory that runs out in an Ultralytics run: it ends as one that had the smaller batch from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from integrations.shared.pieces import Indivisible
from integrations.ultralytics.out_of_memory import images_of
from tests import reference
from tests.short import Short
from tests.ultralytics.conftest import PLAIN, Train

WHOLE: dict[str, Any] = {
    **PLAIN,
    "images": 32,
    "epochs": 2,
    "optimizer": "SGD",
    "lr0": 0.01,
    "warmup_epochs": 0,
    "val": False,
}


def short_of(short: Short) -> dict[str, Any]:
    """A first layer through which memory runs out."""

    def begin(trainer: Any) -> None:
        trainer.model.model[0].register_forward_hook(lambda module, inputs, out: short(out) if module.training else out)

    return {"on_pretrain_routine_end": begin}


@pytest.mark.parametrize(("update", "backward"), [(1, False), (7, True), (8, True)])
def test_the_run_equals_that_with_the_smaller_batch_from_the_start(update: int, backward: bool, train: Train) -> None:
    short = Short(most=2, after=2 * (update - 1) + 1, backward=backward)
    accel = {"batchnorm": "freeze", "plan": "off", "effective_batch": 8}
    saved = train(accel=accel, callbacks=short_of(short), **WHOLE)
    right = train(accel=accel, **{**WHOLE, "batch": 2})
    assert short.failed == 1
    assert reference.difference(saved.weights, right.weights) < 1e-6
    facts = saved.report
    assert (facts["window"]["accumulate"], facts["window"]["micro_batch"], facts["window"]["updates"]) == (4, 2, 8)
    assert facts["memory"]["out_of_memory"] == {"count": 1, "update": update - 1, "micro_batch": 2}
    assert facts["window"]["dropped_micro_batches"] == 0


def test_objects_go_with_their_images() -> None:
    index = torch.tensor([0.0, 1.0, 1.0, 3.0])
    batch = {"img": torch.zeros(4, 3, 8, 8), "batch_idx": index, "cls": torch.arange(4.0).view(4, 1),
             "masks": torch.arange(4), "im_file": ("a", "b", "c", "d"), "ori_shape": ((1, 2),) * 4}  # fmt: skip
    piece = images_of(batch, 2, 4)
    assert (piece["batch_idx"].tolist(), piece["cls"].tolist()) == ([1.0], [[3.0]])
    assert (piece["masks"].tolist(), piece["im_file"], piece["ori_shape"]) == ([2, 3], ("c", "d"), ((1, 2),) * 2)
    assert images_of(batch, 0, 2, overlap=False)["masks"].tolist() == [0, 1, 2]
    with pytest.raises(Indivisible, match=r"a tensor \[7\] in a batch of 4"):
        images_of({**batch, "extra": torch.zeros(7)}, 0, 2)
