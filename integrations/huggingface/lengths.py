"""Lengths of samples, in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

LABELS = ("labels", "label_ids")


def length_key(processing_class: Any, model: Any) -> str:
    """The model input whose length is a sample's length: the tokenizer's first one, else `input_ids`."""
    names = getattr(processing_class, "model_input_names", None)
    return (names or [getattr(model, "main_input_name", "input_ids")])[0]


def length_of(sample: Any, key: str) -> int | None:
    """Tokens of one sample; None where it has no variable-length input (an image, a plain tuple)."""
    value = sample.get(key) if isinstance(sample, Mapping) else None
    if value is None or isinstance(value, str):
        return None
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) == 1 else None
    return len(value) if hasattr(value, "__len__") and not (len(value) and hasattr(value[0], "__len__")) else None


def dataset_lengths(dataset: Any, key: str, column: str = "length") -> list[int] | None:
    """Tokens of every sample of a map-style dataset; None where samples have no length.

    A `column` of lengths (the host's `length_column_name`) is taken where the dataset has it, then a column
    `key` is read alone, and only then sample after sample.
    """
    names = getattr(dataset, "column_names", None) or []
    if isinstance(names, list) and column in names:
        return [int(length) for length in dataset[column]]
    if isinstance(names, list) and key in names and len(dataset):
        if length_of({key: dataset[0][key]}, key) is None:
            return None
        return [len(value) for value in dataset[key]]
    return _all(length_of(dataset[index], key) for index in range(len(dataset)))


def label_lengths(dataset: Any, lengths: list[int]) -> list[int] | None:
    """Length of every sample's labels where it differs from the input's (seq2seq); None elsewhere."""
    name = next((name for name in LABELS if len(dataset) and _has(dataset[0], name)), None)
    if name is None or length_of(dataset[0], name) is None:
        return None
    names = getattr(dataset, "column_names", None) or []
    if isinstance(names, list) and name in names:
        labels: list[int] | None = [len(value) for value in dataset[name]]
    else:
        labels = _all(length_of(dataset[index], name) for index in range(len(dataset)))
    return None if labels is None or labels == lengths else labels


def stream_lengths(dataset: Iterable[Any], key: str, samples: int = 512) -> list[int] | None:
    """Tokens of the first samples of an iterable dataset."""
    return _all(length_of(sample, key) for sample in islice(iter(dataset), samples))


def _has(sample: Any, name: str) -> bool:
    return isinstance(sample, Mapping) and sample.get(name) is not None


def _all(lengths: Iterable[int | None]) -> list[int] | None:
    found = []
    for length in lengths:
        if length is None:
            return None
        found.append(length)
    return found or None
