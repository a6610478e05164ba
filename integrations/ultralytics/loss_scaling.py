"""How each Ultralytics criterion is normalised, and what to multiply its loss by so that windows add up.

Detection (v8DetectionLoss, and oriented boxes) returns `images * N / max(target scores, 1)`. End-to-end heads
hold two of them, whose parameters are disjoint, since the one-to-one branch sees detached features.
Classification is a plain mean over images. RT-DETR divides by the number of objects. Other terms (masks, key
points, depth, semantic maps) have normalisers of their own over the same parameters: one factor at the close
cannot serve both, so they keep the host's size and are named approximate. So is what a user's own criterion returns
beyond the host's terms, and what a user's own `loss` adds to it.

A micro-batch counts once, at the first answer of each criterion. What users ask of it besides (a loss for the log, the
second forward of sharpness-aware minimization) is the host's value, and its gradient keeps the host's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.models.utils.loss import RTDETRDetectionLoss
from ultralytics.nn.tasks import YOLOEModel
from ultralytics.utils.loss import (
    v8ClassificationLoss,
    v8DetectionLoss,
    v8OBBLoss,
)

from integrations.contract import Session
from integrations.patches import Patches
from integrations.ultralytics import versions

ONE_TO_ONE, ONE_TO_MANY, ALL = "one2one", "one2many", ""
DETECTION_TERMS = ("box_loss", "cls_loss", "dfl_loss", "l1_loss", "angle_loss")


class Losses:
    """Puts weights on the criterion of one live model.

    Attributes:
        groups: see `loss_groups`; lists that the session holds too.
        crosses_epochs: False where the criterion changes its own weights every epoch, so that a window has to end.
        around: the weights on what `model.loss` returns.
    """

    def __init__(
        self, model: nn.Module, session: Session, patches: Patches, groups: dict[str, list[nn.Parameter]]
    ) -> None:
        self.model, self.session, self.patches = model, session, patches
        self.groups = groups
        self.crosses_epochs = True
        self._criterion: Any = None
        self._count: Callable[[dict[str, Any]], int] | None = None
        self._unanswered: set[str] = set()  # criteria whose answer for the micro-batch at hand is still to come
        self._inside = False  # the call of `model.loss` for the micro-batch at hand
        self._weighed: Tensor | None = None  # what the criterion returned in this call of `model.loss`
        self._hold()
        self.around = patches.around(model, "loss", self._loss)

    def arm(self) -> None:
        """The next forward is that of the micro-batch at hand, or of a piece of it."""
        self._unanswered = {ALL, ONE_TO_ONE, ONE_TO_MANY}

    def refresh(self) -> None:
        """Between two windows: a callback may have put another criterion on the model, or other parameters."""
        if getattr(self.model, "criterion", None) is not self._criterion:
            self._hold()
        elif self.groups:
            self._sort_parameters()

    def _hold(self) -> None:
        model, session = self.model, self.session
        criterion = _criterion(model)
        if _is_own(model, criterion):  # asked first: what is held may be a function in a criterion's place
            session.measure_nothing("the loss is the user's own")
        self._count = None
        if session.config.normalise == "host":
            session.approximate("all: normalise=host")
        elif hasattr(criterion, ONE_TO_MANY) and hasattr(criterion, ONE_TO_ONE):
            self._end_to_end(criterion)
        elif isinstance(criterion, v8DetectionLoss):
            self._detection(model, "criterion", ALL)
        elif isinstance(criterion, v8ClassificationLoss):
            if type(criterion) is not v8ClassificationLoss:
                session.approximate(f"{type(criterion).__name__}: taken as a mean over images")
            self._count = lambda batch: len(batch["cls"])
        elif isinstance(criterion, RTDETRDetectionLoss):
            session.approximate("RT-DETR: denoising queries depend on the micro-batch")
            self._count = lambda batch: len(batch["cls"])
        elif criterion is not None:
            session.approximate(f"{type(criterion).__name__}: summed as the host does")
        self._criterion = getattr(model, "criterion", None)  # an older host's is held by a function in its place

    def _end_to_end(self, criterion: Any) -> None:
        self.crosses_epochs = not hasattr(criterion, "update")
        self._sort_parameters()
        for group in self.groups:
            self._detection(criterion, group, group)

    def _sort_parameters(self) -> None:
        """Into the lists that the session was given."""
        for group, members in loss_groups(self.model, self.session.config.normalise).items():
            self.groups.setdefault(group, [])[:] = members

    def _detection(self, owner: Any, attribute: str, group: str) -> None:
        """Weight one detection criterion. The target scores' sum is seen where its assigner returns them."""
        leaf = getattr(owner, attribute)
        names = versions.term_names(leaf)
        if type(leaf) not in (v8DetectionLoss, v8OBBLoss):
            own = [name for name in names if name not in DETECTION_TERMS]
            self.session.approximate(f"{type(leaf).__name__}: {', '.join(own) or 'its own terms'}")
        if not hasattr(leaf, "assigner"):
            return
        captured: list[Tensor] = []
        exact: Tensor | None = None  # which entries of what it returns are the host's terms
        wholly = True

        held: list[Any] = []

        def hold_assigner() -> None:
            """The one that is there now: a callback may have put another."""
            if any(leaf.assigner is one for one in held):
                return
            owner, name = (leaf.assigner, "forward") if isinstance(leaf.assigner, nn.Module) else (leaf, "assigner")
            inner = getattr(owner, name)

            def assign(*args: Any, **kwargs: Any) -> Any:
                found = inner(*args, **kwargs)
                captured[:] = [found[2].detach().sum()]  # target_scores [B, anchors, classes]
                return found

            self.patches.put(owner, name, assign)
            held.append(leaf.assigner)

        def loss(preds: Any, batch: dict[str, Any]) -> Any:
            nonlocal exact, wholly
            hold_assigner()
            captured.clear()
            value, items = original(preds, batch)
            if not torch.is_grad_enabled() or not captured:
                return value, items
            if group not in self._unanswered:  # inside, what it adds up to is weighed by `_loss`
                return (value if self._inside and not self.groups else self._beside(value, group)), items
            self._unanswered.discard(group)
            images = batch["img"].shape[0]
            weight = self.session.batch_mean(images, captured.pop(), group)
            if not (isinstance(weight, float) and weight == 1.0):
                if exact is None or exact.shape != value.shape:
                    exact = _host_terms(leaf, names, value, items, images).to(value.device)
                    wholly = bool(exact.all())
                value = value * (weight if wholly else torch.where(exact, weight, self.session.share(group)))
            self._weighed = value
            return value, items

        original = versions.hold_loss(self.patches, owner, attribute, loss)
        hold_assigner()

    def _beside(self, value: Any, group: str) -> Any:
        """A loss that does not count: the host's value, with a gradient that has the host's size after the close."""
        share = self.session.share(group)
        if isinstance(share, float) and share == 1.0:
            return value
        return value.detach() + (value - value.detach()) * share

    def _loss(self, inner: Callable[..., Any], batch: dict[str, Any], preds: Any = None) -> Any:
        """Weight a loss that is one mean over its targets, and what was added to the criterion's."""
        self._inside, self._weighed = bool(self._unanswered) and torch.is_grad_enabled(), None
        try:
            value, items = inner(batch) if preds is None else inner(batch, preds)
        finally:
            first, self._inside = self._inside, False
        if not first:
            mean = torch.is_grad_enabled() and self._count is not None
            return (self._beside(value, ALL) if mean else value), items
        self._unanswered.clear()
        weighed, self._weighed = self._weighed, None
        terms = [torch.as_tensor(v).detach().sum() for v in (items.values() if isinstance(items, Mapping) else [items])]
        self.session.loss(sum(terms[1:], terms[0]), len(batch["img"]))
        if self._count is not None:
            return value * self.session.mean(self._count(batch)), items
        if weighed is None or value is weighed or self.groups:
            return value, items
        share = self.session.share(ALL)
        if isinstance(share, float) and share == 1.0:
            return value, items
        self.session.approximate("loss: what is added to the criterion's keeps the host's size")
        return weighed.sum() + (value.sum() - weighed.sum()) * share, items


def loss_groups(model: nn.Module, normalise: str) -> dict[str, list[nn.Parameter]]:
    """Parameters by loss group, for end-to-end heads, whose two criteria count apart; otherwise empty."""
    criterion = _criterion(model)
    if normalise == "host" or not (hasattr(criterion, ONE_TO_MANY) and hasattr(criterion, ONE_TO_ONE)):
        return {}
    named = list(model.named_parameters())
    return {
        ONE_TO_ONE: [p for n, p in named if ONE_TO_ONE in n],
        ONE_TO_MANY: [p for n, p in named if ONE_TO_ONE not in n],
    }


def _criterion(model: Any) -> Any:
    """Built as the host does in the first forward; some models choose theirs by the batch, or have none."""
    if getattr(model, "criterion", None) is None and not isinstance(model, YOLOEModel):
        with suppress(NotImplementedError):
            model.criterion = model.init_criterion()
    return getattr(model, "criterion", None)


def _is_own(model: Any, criterion: Any) -> bool:
    """Whether a user wrote the loss, or a part of it: it is called as often as by the host."""
    parts = (criterion, getattr(criterion, ONE_TO_MANY, None), getattr(criterion, ONE_TO_ONE, None))
    loss = getattr(type(model), "loss", None)
    codes = [getattr(loss, "__module__", ""), *(type(part).__module__ for part in parts if part is not None)]
    return any(code.split(".")[0] != "ultralytics" for code in codes)


def _host_terms(leaf: Any, names: tuple[str, ...], value: Tensor, items: Any, images: int) -> Tensor:
    """Which entries of a detection criterion's `value` are `images` times a term of the host's; of the same shape.

    The host's own criteria are known. A user's may return one number, more entries, or others: an entry counts where
    its size is that of the term which it reports under this name.
    """
    known = [name in DETECTION_TERMS for name in names]
    if type(leaf).__module__ == v8DetectionLoss.__module__ and value.numel() == len(names):
        return torch.tensor(known).reshape(value.shape)
    reported = (
        items if isinstance(items, Mapping) else dict(zip(names, torch.as_tensor(items).reshape(-1), strict=False))
    )
    expected = [images * float(reported.get(name, float("nan"))) for name in names]
    if value.numel() == 1:
        known, expected = [all(known)], [sum(expected)]
    found = [
        right and abs(have - expect) <= 1e-3 * abs(expect) + 1e-6
        for have, expect, right in zip(value.detach().reshape(-1).tolist(), expected, known, strict=False)
    ]
    return torch.tensor(found + [False] * (value.numel() - len(found))).reshape(value.shape)
