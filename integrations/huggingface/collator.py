"""A collator that pads every batch to the edge of its bucket, labels too, around the user's own collator."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset

from integrations.huggingface.bucket_sampler import Placed
from integrations.huggingface.bucketing import fitted
from integrations.huggingface.lengths import RENAMED, Form, is_label, length_of
from integrations.huggingface.padding import ANSWERS

IGNORED = -100
"""The label that no loss of the host counts."""

FILL = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "global_attention_mask": 0,
}
"""Inputs [B, L] that go along the length by their meaning, and what they hold beyond it."""


class Marked(NamedTuple):
    """A sample, untouched, and its batch's edges: what goes from the sampler to the collator, across workers."""

    sample: Any
    edge: int
    label_edge: int


class PlacedDataset(Dataset[Any]):
    """A map-style dataset that is indexed by `Placed` and hands the edges on to the collator."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.order: Callable[[], list[int]] | None = None  # the order of visits, where it is not the data's own

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, placed: Placed) -> Marked:
        return Marked(self.dataset[placed.sample], placed.edge, placed.label_edge)

    def __getitems__(self, batch: Sequence[Placed]) -> list[Marked]:
        indices = [placed.sample for placed in batch]
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]
        return [Marked(sample, at.edge, at.label_edge) for sample, at in zip(samples, batch, strict=True)]

    def __getattr__(self, name: str) -> Any:
        # everything else (column_names, features, set_format …) is the dataset's own
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class BucketCollator:
    """Pads what the host's collator returns to the edge of the bucket.

    Args:
        collate: the collator of the user or the host; sees the samples as they are.
        edges: rising edges in tokens; a batch without a mark gets the smallest one that holds it.
        forms: how the samples' values follow the length.
        label_names: what the host takes for labels, besides what is called so.
        pad_token_id: fills `input_ids`.
        side: "right" or "left", the tokenizer's padding side.
        key: the tensor [B, L] whose dim 1 is the length.
        masked: the model takes an attention mask; a batch without one gets it, or padding would be read.
        copies: labels that the collator makes go along the input, as those of the host's own collators do.
        room: tokens that the model has positions for.

    Padded are the inputs that are known to go along the length, integer labels that do so in the samples, and
    labels with a varying length of their own to the label edge, with the decoder's inputs of that length. A batch
    with any tensor of which this is not known stays as it came, and so does one that the collator padded to another
    length than its longest sample's: that is a rule of its own, a fixed length or a multiple.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        edges: Sequence[int],
        *,
        forms: Mapping[str, Form] | None = None,
        label_names: Collection[str] = (),
        pad_token_id: int = 0,
        side: str = "right",
        key: str = "input_ids",
        masked: bool = True,
        copies: bool = False,
        room: int = sys.maxsize,
    ) -> None:
        self.collate, self.edges, self.forms, self.label_names = collate, sorted(edges), forms or {}, label_names
        self.pad_token_id, self.side, self.key = pad_token_id, side, key
        self.masked, self.copies, self.room = masked, copies, room
        self._told = False

    def __call__(self, features: list[Any]) -> Any:
        """The user's collator on these samples, padded to the edge of their bucket where that is known to be right."""
        edge = label_edge = 0
        if features and isinstance(features[0], Marked):
            edge = max(feature.edge for feature in features)
            label_edge = max(feature.label_edge for feature in features)
            features = [feature.sample for feature in features]
        longest = max((length_of(feature, self.key) or 0 for feature in features), default=0)
        samples = len(features)  # collators may change the list
        batch = self.collate(features)
        inputs = batch.get(self.key) if isinstance(batch, MutableMapping) else None
        if not isinstance(inputs, torch.Tensor) or inputs.dim() != 2 or inputs.shape[0] != samples:
            return batch
        length = inputs.shape[1]
        if length != longest or not self.edges:
            return batch
        edge = edge if edge >= length else self._edge(length)
        if edge > max(self.edges[-1], self.room):
            edge = length  # a sample beyond all that was seen, and perhaps beyond the model's positions
        widths = {
            name: self._width(name, batch, edge, label_edge)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and (value.dim() > 1 or name in ANSWERS)
        }
        unclear = [name for name, width in widths.items() if width is None]
        if edge > length and "attention_mask" not in batch and not self.masked:
            unclear.append("attention_mask")
        if unclear:
            if edge > length:
                self._tell(unclear[0])
            return batch
        return self._padded(batch, widths, length, edge)

    def _padded(self, batch: Any, widths: Mapping[str, int | None], length: int, edge: int) -> Any:
        rows = batch[self.key].shape[0]
        batch = copy.copy(batch)
        if edge > length and "attention_mask" not in batch:
            batch["attention_mask"] = self._pad(torch.ones(rows, length, dtype=torch.long), edge, 0)
        for name, width in widths.items():
            value = batch[name]
            if name in ANSWERS:
                batch[name] = value.masked_fill(value >= length, edge) if edge > length else value
            else:
                batch[name] = self._pad(value, width or 0, self._fill(name))
        return batch

    def _edge(self, length: int) -> int:
        return next((edge for edge in self.edges if edge >= length), fitted(length, self.room))

    def _width(self, name: str, batch: Any, edge: int, label_edge: int) -> int | None:
        """What dim 1 of a tensor is padded to; 0 where it stays, None where nobody knows."""
        value, inputs = batch[name], batch[self.key]
        form = self.forms.get(RENAMED.get(name, name))
        along = value.shape == inputs.shape
        if name in ANSWERS:
            return 0 if value.dim() == 1 and self.side == "right" else None
        if name == self.key or name in FILL:
            return edge if value.dim() == 2 and along | (value.shape == (1, inputs.shape[1])) else None
        if form is Form.FIXED:
            return 0
        if is_label(name, self.label_names):
            if value.is_floating_point() or value.dim() != 2:
                return None
            if form is Form.OWN:
                return max(label_edge or fitted(value.shape[1], self.room), value.shape[1])
            made = form is None and (self.copies or (along and bool(((value == IGNORED) | (value == inputs)).all())))
            return edge if along and (form is Form.ALONG or made) else None
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.dim() == 2 and labels.shape[1] in value.shape[1:]:
            follows = name.startswith("decoder_") and labels.shape == value.shape
            return self._width("labels", batch, edge, label_edge) if follows else None
        return 0 if form is None and inputs.shape[1] not in value.shape[1:] else None

    def _fill(self, name: str) -> int:
        if name in FILL:
            return FILL[name]
        if is_label(name, self.label_names):
            return IGNORED
        return self.pad_token_id if name.endswith("input_ids") else 0

    def _pad(self, value: torch.Tensor, width: int, fill: int) -> torch.Tensor:
        missing = width - value.shape[1]
        if missing <= 0:
            return value
        block = value.new_full((value.shape[0], missing), fill)
        return torch.cat([value, block] if self.side == "right" else [block, value], dim=1)

    def _tell(self, name: str) -> None:
        if not self._told:
            self._told = True
            logging.getLogger(__name__).warning(
                "accel: buckets: whether `%s` goes along the input's length is not known, so batches are not padded",
                name,
            )


class BucketedStream(IterableDataset[Any]):
    """An iterable dataset whose samples come in runs of one bucket, from a bounded buffer.

    A bucket is handed out as soon as it holds one step, so at most `len(edges) * (batch_size * ranks - 1)`
    samples wait at any time. What is left at the end is dealt from the shortest bucket to the longest one.

    The dataset is iterated as often as without buckets. What `choose` looks at is handed on.

    Args:
        dataset: any iterable of samples with `length_of(sample)` tokens.
        group: samples of a step over all ranks (batch_size * ranks).
        choose: finds `edges` from up to `first` samples, once; no edges: the samples come as they are.
        most: samples that a run can use; more are not taken, since they would be lost.
    """

    def __init__(
        self,
        dataset: Any,
        edges: Sequence[int],
        group: int,
        length_of: Callable[[Any], int],
        *,
        choose: Callable[[list[Any]], Sequence[int]] | None = None,
        first: int = 512,
        most: int = sys.maxsize,
    ) -> None:
        self.dataset, self.edges, self.group, self.length_of = dataset, sorted(edges), group, length_of
        self.choose, self.first, self.most = choose, first, most

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.dataset)
        if self.choose is not None:
            seen = list(islice(source, min(self.first, self.most)))
            self.edges, self.choose = sorted(self.choose(seen)), None
            source = chain(seen, source)
        yield from self._dealt(islice(source, self.most)) if self.edges else source

    def _dealt(self, samples: Iterable[Any]) -> Iterator[Marked]:
        waiting: dict[int, list[Any]] = {edge: [] for edge in self.edges}
        for sample in samples:
            length = self.length_of(sample)
            edge = next((edge for edge in self.edges if edge >= length), None) or self._overflow(length)
            bucket = waiting.setdefault(edge, [])
            bucket.append(sample)
            if len(bucket) == self.group:
                yield from self._marked(bucket, edge)
                waiting[edge] = []
        left: list[Any] = []
        last = max((edge for edge, bucket in waiting.items() if bucket), default=0)
        for edge in sorted(waiting):
            left += waiting[edge]
            while len(left) >= self.group:
                yield from self._marked(left[: self.group], edge)
                left = left[self.group :]
        yield from self._marked(left, last)

    def _overflow(self, length: int) -> int:
        """The last edge doubled until it holds a sample that is longer than every edge: still few shapes."""
        edge = self.edges[-1]
        while edge < length:
            edge *= 2
        return edge

    def _marked(self, samples: list[Any], edge: int) -> list[Marked]:
        return [Marked(sample, edge, 0) for sample in samples]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, where the data set takes one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # raises TypeError where the stream has no length, as the host expects

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)
