"""A collator that pads every batch to the edge of its bucket, labels too, around the user's own collator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from integrations.huggingface.edges import round_up
from integrations.huggingface.sampler import Placed

EDGE, LABEL_EDGE = "_bucket_edge", "_label_edge"
"""Keys under which a sample carries its batch's edges from the sampler to the collator, across workers."""

IGNORED = -100
"""The label that no loss of the host counts."""


class PlacedDataset(Dataset[Any]):
    """A map-style dataset that is indexed by `Placed` and hands the edges on to the collator."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.order: Callable[[], list[int]] | None = None  # the order of visits, where it is not the data's own

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, placed: Placed | int) -> Any:
        if not isinstance(placed, Placed):
            return self.dataset[placed]
        return mark(self.dataset[placed.sample], placed)

    def __getitems__(self, batch: Sequence[Placed]) -> list[Any]:
        indices = [placed.sample for placed in batch]
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]
        return [mark(sample, placed) for sample, placed in zip(samples, batch, strict=True)]

    def __getattr__(self, name: str) -> Any:
        # everything else (column_names, features, set_format …) is the dataset's own
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def mark(sample: Any, placed: Placed) -> Any:
    """The sample with its batch's edges; a sample that is no mapping is left as it is."""
    if not isinstance(sample, Mapping):
        return sample
    return {**sample, EDGE: placed.edge, LABEL_EDGE: placed.label_edge}


class BucketCollator:
    """Pads what the host's collator returns to the edge of the bucket.

    Args:
        collate: the collator of the user or the host; sees its features without any addition.
        edges: rising edges in tokens; a batch without a mark gets the smallest one that holds it.
        pad_token_id: fills `input_ids`.
        side: "right" or "left", the tokenizer's padding side.
        key: the tensor whose dim 1 is the length, [B, L, ...].

    Tensors of shape [B, L, ...] are padded along dim 1 to the edge: token ids with `pad_token_id`, masks and
    everything else with 0, labels with -100. Labels [B, T] of another length are padded to the label edge.
    A batch that has no attention mask gets one wherever padding is added here, else padding would be read.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        edges: Sequence[int],
        *,
        pad_token_id: int = 0,
        side: str = "right",
        key: str = "input_ids",
        masked: bool = True,
    ) -> None:
        self.collate, self.edges, self.pad_token_id, self.side, self.key = (
            collate,
            sorted(edges),
            pad_token_id,
            side,
            key,
        )
        self.masked = masked

    def __call__(self, features: list[Any]) -> Any:
        edge = label_edge = 0
        if features and isinstance(features[0], Mapping) and EDGE in features[0]:
            edge = max(feature[EDGE] for feature in features)
            label_edge = max(feature[LABEL_EDGE] for feature in features)
            features = [{k: v for k, v in f.items() if k not in (EDGE, LABEL_EDGE)} for f in features]
        batch = self.collate(features)
        inputs = batch.get(self.key) if isinstance(batch, Mapping) else None
        if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
            return batch
        length = inputs.shape[1]
        edge = max(edge or self._edge(length), length)
        padded = {name: self._padded(name, value, length, edge, label_edge) for name, value in batch.items()}
        if edge > length and self.masked and "attention_mask" not in padded:
            mask = torch.ones(inputs.shape[:2], dtype=torch.long)
            padded["attention_mask"] = self._pad(mask, edge, 0)
        return type(batch)(padded) if type(batch) is not dict else padded

    def _edge(self, length: int) -> int:
        return next((edge for edge in self.edges if edge >= length), round_up(length))

    def _padded(self, name: str, value: Any, length: int, edge: int, label_edge: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        label = "label" in name
        if value.shape[1] == length and not (label and label_edge):
            return self._pad(value, edge, self._fill(name))
        if (label or name.startswith("decoder_")) and value.dim() == 2:
            # seq2seq: labels and decoder inputs have a length of their own
            return self._pad(value, max(label_edge, round_up(value.shape[1])), self._fill(name))
        return value

    def _fill(self, name: str) -> int:
        if "label" in name:
            return IGNORED
        return {"special_tokens_mask": 1}.get(name, self.pad_token_id if name.endswith("input_ids") else 0)

    def _pad(self, value: torch.Tensor, edge: int, fill: int) -> torch.Tensor:
        missing = edge - value.shape[1]
        if missing <= 0:
            return value
        block = value.new_full((value.shape[0], missing, *value.shape[2:]), fill)
        return torch.cat([value, block] if self.side == "right" else [block, value], dim=1)


class BucketedStream(IterableDataset[Any]):
    """An iterable dataset whose samples come in runs of one bucket, from a bounded buffer.

    A bucket is handed out as soon as it holds one step, so at most `len(edges) * (batch_size * ranks - 1)`
    samples wait at any time. What is left at the end is dealt from the shortest bucket to the longest one.

    Args:
        dataset: any iterable of samples with `length_of(sample)` tokens.
        group: samples of a step over all ranks (batch_size * ranks).
    """

    def __init__(self, dataset: Any, edges: Sequence[int], group: int, length_of: Callable[[Any], int]) -> None:
        self.dataset, self.edges, self.group, self.length_of = dataset, sorted(edges), group, length_of

    def __iter__(self) -> Iterator[Any]:
        waiting: dict[int, list[Any]] = {edge: [] for edge in self.edges}
        for sample in self.dataset:
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

    def _marked(self, samples: list[Any], edge: int) -> list[Any]:
        return [mark(sample, Placed(0, edge, 0)) for sample in samples]

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # raises TypeError where the stream has no length, as the host expects

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)
