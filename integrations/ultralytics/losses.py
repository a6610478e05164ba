"""How each Ultralytics criterion is normalised, and what to multiply its loss by so that windows add up.

Detection (v8DetectionLoss, and oriented boxes) returns `images * N / max(target scores, 1)`. End-to-end heads
hold two of them, whose parameters are disjoint, since the one-to-one branch sees detached features.
Classification is a plain mean over images. RT-DETR divides by the number of objects. Other terms (masks, key
points, depth, semantic maps) have normalisers of their own over the same parameters: one factor at the close
cannot serve both, so they keep the host's size and are named approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.models.utils.loss import RTDETRDetectionLoss
from ultralytics.utils.loss import (
    v8ClassificationLoss,
    v8DetectionLoss,
    v8OBBLoss,
)

from integrations.patches import Patches
from integrations.seam import Seam
from integrations.ultralytics import versions

ONE_TO_ONE, ONE_TO_MANY, ALL = "one2one", "one2many", ""
DETECTION_TERMS = ("box_loss", "cls_loss", "dfl_loss", "l1_loss", "angle_loss")


class Losses:
    """Puts weights on the criterion of one live model.

    Attributes:
        groups: parameters by loss group, for end-to-end heads; otherwise empty.
        crosses_epochs: False where the criterion changes its own weights every epoch, so that a window has to end.
    """

    def __init__(self, model: nn.Module, seam: Seam, patches: Patches) -> None:
        self.seam, self.patches = seam, patches
        self.groups: dict[str, list[nn.Parameter]] = {}
        self.crosses_epochs = True
        if getattr(model, "criterion", None) is None:
            model.criterion = model.init_criterion()  # type: ignore[operator]
        criterion: Any = model.criterion
        if seam.config.normalise == "host":
            seam.approximate("all: normalise=host")
        elif hasattr(criterion, ONE_TO_MANY) and hasattr(criterion, ONE_TO_ONE):
            self._end_to_end(model, criterion)
        elif isinstance(criterion, v8DetectionLoss):
            self._detection(model, "criterion", ALL)
        elif isinstance(criterion, v8ClassificationLoss):
            self._whole(model, lambda batch: len(batch["cls"]))
        elif isinstance(criterion, RTDETRDetectionLoss):
            seam.approximate("RT-DETR: denoising queries depend on the micro-batch")
            self._whole(model, lambda batch: len(batch["cls"]))
        else:
            seam.approximate(f"{type(criterion).__name__}: summed as the host does")

    def _end_to_end(self, model: nn.Module, criterion: Any) -> None:
        self.crosses_epochs = not hasattr(criterion, "update")
        named = list(model.named_parameters())
        self.groups = {
            ONE_TO_ONE: [p for n, p in named if ONE_TO_ONE in n],
            ONE_TO_MANY: [p for n, p in named if ONE_TO_ONE not in n],
        }
        for group in self.groups:
            self._detection(criterion, group, group)

    def _detection(self, owner: Any, attribute: str, group: str) -> None:
        """Weight one detection criterion. The target scores' sum is seen where its assigner returns them."""
        leaf = getattr(owner, attribute)
        names = versions.term_names(leaf)
        if type(leaf) not in (v8DetectionLoss, v8OBBLoss):
            own = [name for name in names if name not in DETECTION_TERMS]
            self.seam.approximate(f"{type(leaf).__name__}: {', '.join(own) or 'its own terms'}")
        captured: list[Tensor] = []
        assigner = leaf.assigner
        exact = torch.tensor([name in DETECTION_TERMS for name in names], device=leaf.device)
        wholly = all(name in DETECTION_TERMS for name in names)

        def assign(*args: Any, **kwargs: Any) -> Any:
            found = assigner(*args, **kwargs)
            captured[:] = [found[2].detach().sum()]  # target_scores [B, anchors, classes]
            return found

        def loss(preds: Any, batch: dict[str, Any]) -> Any:
            value, items = original(preds, batch)
            if not torch.is_grad_enabled() or not captured:
                return value, items
            weight = self.seam.batch_mean(batch["img"].shape[0], captured.pop(), group)
            if isinstance(weight, float) and weight == 1.0:
                return value, items
            factors = weight if wholly else torch.where(exact, weight, self.seam.share(group))
            return value * factors, items

        original = versions.hold_loss(self.patches, owner, attribute, loss)
        self.patches.put(leaf, "assigner", assign)

    def _whole(self, model: nn.Module, count: Callable[[dict[str, Any]], int]) -> None:
        """Weight a criterion that is one mean over `count(batch)` targets."""

        def loss(batch: dict[str, Any], preds: Any = None) -> Any:
            value, items = original(batch, preds)
            return value * self.seam.mean(count(batch)), items

        original = self.patches.put(model, "loss", loss)
