"""Where memory runs out in an Ultralytics run: a batch is trained in pieces, inside the call that gives its loss.

The host's loop calls `model(batch)` and, apart from it, the backward of the loss. While all is well, what the loop
gets stands for the loss: its backward runs the loss's own, so that a lack of memory is met here in either half, with
nothing else holding the graph. Once batches are divided, the pieces' backward is done by the time that the loop has
the loss, which then has no graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from integrations.contract import Session
from integrations.shared.pieces import Indivisible, rows
from integrations.ultralytics.loss_scaling import Losses
from integrations.ultralytics.precision_layout import Layout

OBJECTS = ("batch_idx", "cls", "bboxes", "keypoints", "segments", "obb")  # one row an object, where there is batch_idx


class _Later(torch.autograd.Function):
    """A value whose backward is `run`; `anchor` requires a gradient, and gets none."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, run: Callable[[Tensor, bool], None]) -> Tensor:
        ctx.run = run
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        run, keep = ctx.run, torch._C._autograd._get_current_graph_task_keep_graph()
        if run is None:
            raise RuntimeError("a second backward of a loss whose graph is gone: give the first one retain_graph=True")
        if not keep:
            ctx.run = None  # the trainer keeps its last loss, which would keep the run
        run(gradient, keep)
        return None, None, None


class Rescuing:
    """Of one run.

    Args:
        trainer: the host's.
        session: of the run.
        layout: knows the host's autocast.
        losses: what weighs `model.loss`, which is done in pieces here, each weighed.
    """

    def __init__(self, trainer: Any, session: Session, layout: Layout, losses: Losses) -> None:
        self.trainer, self.session, self.layout, self.losses = trainer, session, layout, losses
        self.alone = not isinstance(trainer.model, nn.parallel.DistributedDataParallel)
        self._weighed, losses.around.around = losses.around.around, self._loss
        self._armed = False  # the next loss is that of the micro-batch at hand
        self._root: Tensor | None = None  # the loss with its graph
        session.rescue.held_by(again=self._forget, keep=self._keep)

    def note(self, batch: Any, preprocess: Callable[[Any], dict[str, Any]]) -> None:
        """A batch has come from the loader.

        Args:
            batch: as the loader gave it.
            preprocess: what the loop does with it, to be done again.
        """
        raw = copy.copy(batch)  # the host moves tensors to the device inside its own dict
        plain = isinstance(raw, Mapping) and "img" in raw  # a user's own `preprocess_batch` may take anything

        def again() -> Any:
            with self.layout.host_autocast():
                return self.losses.around.enter(self._in_pieces, preprocess(copy.copy(raw)))

        samples = len(raw["img"]) if plain else self.trainer.batch_size
        self.session.rescue.note(again, samples, lambda: self._why(raw if plain else {}))

    def arm(self) -> None:
        """The micro-batch at hand comes next, trials are over."""
        self._armed = True
        self.losses.arm()

    def first_piece(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What a trial runs on."""
        return self._pieces(batch)[0]

    # -- the two halves of a step ----------------------------------------------------------------------------------

    def _loss(self, inner: Callable[..., Any], batch: dict[str, Any], preds: Any = None) -> Any:
        armed, self._armed = self._armed, False
        if not armed or not torch.is_grad_enabled():
            return self._weighed(inner, batch, preds)
        if self.session.rescue.limit is not None:
            return self.session.rescue.guarded(lambda: self._in_pieces(inner, batch))
        return self.session.rescue.guarded(lambda: self._whole(inner, batch, preds))

    def _whole(self, inner: Callable[..., Any], batch: dict[str, Any], preds: Any) -> Any:
        value, items = self._weighed(inner, batch, preds)
        # With a gradient of the images the loss is asked for more than its backward.
        if not self.alone or not value.requires_grad or batch["img"].requires_grad:
            return value, items
        self._root = value
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return _Later.apply(value.detach(), anchor, self._run), items  # type: ignore[no-untyped-call]

    def _run(self, gradient: Tensor, keep: bool) -> None:
        with torch.enable_grad():
            self.session.rescue.guarded(lambda: self._backward(gradient, keep))

    def _backward(self, gradient: Tensor, keep: bool) -> None:
        assert self._root is not None, "a backward of another batch's loss"
        torch.autograd.backward(self._root, gradient, retain_graph=keep)
        if not keep:
            self._root = None

    def _in_pieces(self, inner: Callable[..., Any], batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Forward and backward of each piece, in the host's autocast; the sum of their losses, and the mean items."""
        values: list[Tensor] = []
        found: list[tuple[int, Any]] = []
        for piece in self._pieces(batch):
            self.losses.arm()
            value, items = self._weighed(inner, piece)
            with torch.autocast(value.device.type, enabled=False):
                self.trainer.scaler.scale(value.sum()).backward()
            values.append(value.detach())
            found.append((len(piece["img"]), items))
            del value
        total = values[0] if len(values) == 1 else torch.stack(values).sum(0)
        return total.requires_grad_(), _mean(found)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _pieces(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        images, limit = len(batch["img"]), self.session.rescue.limit
        try:
            return self._divided(batch, min(limit or images, images))
        except Indivisible:
            return [batch]

    def _divided(self, batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
        images = len(batch["img"])
        if size >= images:
            return [batch]
        overlap = bool(getattr(self.trainer.args, "overlap_mask", True))
        return [images_of(batch, at, min(at + size, images), overlap) for at in range(0, images, size)]

    def _why(self, batch: dict[str, Any]) -> str:
        if not self.alone:
            return "several processes, which would wait for each other"
        if not isinstance(batch.get("img"), Tensor):
            return "its form is known to the trainer's own preprocess_batch alone"
        try:
            self._divided(batch, max(len(batch["img"]) // 2, 1))
        except Indivisible as error:
            return str(error)
        return ""

    def _forget(self) -> None:
        self._root = None

    def _keep(self) -> str:
        last = self.trainer.last
        return f"{last.name} holds those of epoch {self.trainer.epoch}" if last.is_file() else ""


def images_of(batch: Mapping[str, Any], start: int, stop: int, overlap: bool = True) -> dict[str, Any]:
    """The images from `start` to `stop` of a batch with their objects, which are counted from the first of them.

    Args:
        batch: of the host's; `img` [B, C, H, W], `batch_idx` [objects] where there are objects.
        start: the first image.
        stop: the one after the last.
        overlap: masks are one an image, not one an object.

    Raises:
        Indivisible: a tensor that has a row neither for each image nor for each object.
    """
    images, index = len(batch["img"]), batch.get("batch_idx")
    mine = (index >= start) & (index < stop) if isinstance(index, Tensor) else None
    piece: dict[str, Any] = {}
    for name, value in batch.items():
        of_objects = name in OBJECTS or (name == "masks" and not overlap)
        if isinstance(value, (list, tuple)):
            piece[name] = value[start:stop] if len(value) == images else value
        elif mine is not None and of_objects and isinstance(value, Tensor) and len(value) == len(mine):
            piece[name] = value[mine.to(value.device)]
        else:
            piece[name] = rows(value, start, stop, images)
    if mine is not None:
        piece["batch_idx"] = piece["batch_idx"] - start
    return piece


def _mean(found: list[tuple[int, Any]]) -> Any:
    """Of the pieces' loss items, a dict or a tensor, by their images."""
    total = sum(images for images, _ in found)
    first = found[0][1]
    if len(found) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: sum(items[name] * (images / total) for images, items in found) for name in first}
    return sum(items * (images / total) for images, items in found)
