"""Micro-batches for the loop: pictures read, scaled, augmented and padded, with their labels as classes."""

from __future__ import annotations

import signal
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from integrations.easyocr.augment import Augment
from integrations.easyocr.bucketing import Batch
from integrations.easyocr.data import LineSet
from integrations.easyocr.labels import encode, infeasible
from integrations.easyocr.network import Features, frames
from integrations.easyocr.preprocess import Preprocess, pad_batch


@dataclass
class MicroBatch:
    """images [B, 1, H, W] in -1..1, classes [sum of lengths], lengths [B].

    padding: padded px of all B * W; infeasible: labels with more frames than T; unreadable: names of lost pictures.
    """

    images: Tensor
    classes: Tensor
    lengths: Tensor
    labels: list[str] = field(default_factory=list)
    padding: int = 0
    infeasible: int = 0
    unreadable: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def parts(self, most_px: int, least: int = 4, limit: int | None = None) -> Iterator[MicroBatch]:
        """Parts of at most `most_px` samples x px, halved until they fit, but of no fewer than `least` samples.

        Halves keep the number of shapes bounded; the fewest samples keep BatchNorm's statistics usable. `limit` is the
        most samples of a part since memory ran out.
        """
        size = len(self)
        while size * self.images.shape[3] > most_px and -(-size // 2) >= least:
            size = -(-size // 2)
        size = min(size, limit or size)
        ends = self.lengths.cumsum(0).tolist()
        for at in range(0, len(self), size):
            stop = min(at + size, len(self))
            classes = self.classes[ends[at - 1] if at else 0 : ends[stop - 1]]
            yield MicroBatch(self.images[at:stop], classes, self.lengths[at:stop], self.labels[at:stop])

    def pin_memory(self) -> MicroBatch:
        """The pictures in pinned memory, as the loader asks for it."""
        self.images = self.images.pin_memory()
        return self


class Lines(Dataset[MicroBatch]):
    """All training lines, joined; `lines[batch]` is a padded micro-batch.

    A picture that cannot be decoded is left out of its batch and named in `unreadable`.
    """

    def __init__(
        self,
        sets: Sequence[LineSet],
        preprocess: Preprocess,
        codec: Any,
        features: Features,
        contrast: float = 0.0,
        augment: Augment | None = None,
    ) -> None:
        self.sets, self.preprocess, self.codec, self.features = list(sets), preprocess, codec, features
        self.contrast, self.augment = contrast, augment
        self._ends = list(accumulate(len(part.lines) for part in self.sets))

    def __len__(self) -> int:
        return self._ends[-1]

    def widths(self) -> list[int]:
        """Scaled width in px of every line."""
        scaled = self.preprocess.scaled_width
        return [scaled(line.width, line.height) for part in self.sets for line in part.lines]

    def place(self, index: int) -> tuple[LineSet, int]:
        """(set, index in it) of a line of all of them."""
        part = bisect_right(self._ends, index)
        return self.sets[part], index - (self._ends[part - 1] if part else 0)

    def __getitem__(self, batch: Batch) -> MicroBatch:
        crops, labels, unreadable = [], [], []
        for index in batch.indices:
            part, at = self.place(index)
            grey = part.grey(at)
            if grey is None:
                unreadable.append(part.lines[at].name)
                continue
            crop = self.preprocess.scale(grey, self.contrast)
            crops.append(self.augment(crop, batch.epoch, index) if self.augment else crop)
            labels.append(part.lines[at].label)
        if not crops:
            empty = torch.empty(0, 1, self.preprocess.height, batch.width)
            return MicroBatch(empty, *encode([], self.codec), unreadable=unreadable)
        # A file's header may lie about its width; the batch then grows rather than fail.
        width = max(batch.width, *(crop.shape[1] for crop in crops))
        return MicroBatch(
            pad_batch(crops, width),
            *encode(labels, self.codec),
            labels=labels,
            padding=sum(width - crop.shape[1] for crop in crops),
            infeasible=infeasible(labels, frames(self.features, width)),
            unreadable=unreadable,
        )


def loader(lines: Lines, batches: Iterable[Batch], workers: int, pin: bool = False) -> DataLoader[MicroBatch]:
    """One loader for the whole run, over an endless order of batches: an epoch's end is not seen here.

    It has a generator of its own, so that making it draws nothing from the run's random state.
    """
    return DataLoader(
        lines,
        sampler=_Order(batches),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_start_worker if workers else None,
        generator=torch.Generator(),
        pin_memory=pin,
    )


class _Order:
    """Batches as a sampler; endless, so without a length."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _start_worker(worker: int) -> None:
    """One thread; Ctrl-C and a SIGTERM to the whole process group are the parent's to answer, which still needs data.

    A killed parent is seen by torch's own loop, within seconds.
    """
    import cv2

    cv2.setNumThreads(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _let_one_pass)


def _let_one_pass(number: int, frame: Any) -> None:
    """A second SIGTERM ends this worker: torch and Python send it to one that hangs when the run is over."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
