"""What samples say of themselves: their length in tokens, and which of their values go along that length."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

BUDGET = 2.0
"""Seconds that reading samples may take before the first step."""

SEEN = 256
"""Samples that are looked into where the lengths of all are known without reading them."""

RENAMED = {"label": "labels", "label_ids": "labels"}
"""What the host's own collators call these."""

POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)


class Form(Enum):
    """How the shape of a value follows the length of its sample."""

    ALONG = "its first dimension is the sample's length, no other one is"
    OWN = "one dimension, with a length of its own"
    FIXED = "the same shape for every sample"
    UNCLEAR = "none of these, or too few samples to tell"


class Survey(NamedTuple):
    """Lengths of all samples; `label_lengths` where labels have a length of their own (seq2seq)."""

    lengths: list[int]
    label_lengths: list[int] | None
    forms: dict[str, Form]
    against: str = ""
    """Why batches must stay as the user's collator makes them, where they must."""


class Unread(Exception):
    """The samples could not be read in time, or at all; the text says why."""


def length_key(processing_class: Any, model: Any) -> str:
    """The model input whose length is a sample's length: the tokenizer's first one, else `input_ids`."""
    names = getattr(processing_class, "model_input_names", None)
    return (names or [getattr(model, "main_input_name", "input_ids")])[0]


def length_of(sample: Any, key: str) -> int | None:
    """Tokens of one sample; None where it has no variable-length input (an image, a plain tuple)."""
    shape = _shape(sample.get(key)) if isinstance(sample, Mapping) else None
    return shape[0] if shape is not None and len(shape) == 1 else None


def own_labels(found: Survey, label_names: Collection[str] = ()) -> list[str]:
    """Labels with a length of their own."""
    return [name for name, form in found.forms.items() if form is Form.OWN and is_label(name, label_names)]


def is_label(name: str, label_names: Collection[str]) -> bool:
    """Whether a value of a sample of this name is a label."""
    return name in label_names or ("label" in name and not name.endswith("mask"))


def survey(
    samples: Iterable[Any], key: str, label_names: Collection[str] = (), budget: float | None = None
) -> Survey | None:
    """Read samples; None where one has no length.

    Raises:
        Unread: a sample cannot be read, or reading takes more than `budget` seconds (BUDGET).
    """
    budget = BUDGET if budget is None else budget
    lengths: list[int] = []
    seen: dict[str, set[tuple[int, tuple[int, ...]]]] = {}
    labels: dict[str, list[int]] = {}
    started = time.monotonic()
    try:
        with _random_kept():
            for sample in samples:
                length = length_of(sample, key)
                if length is None:
                    return None
                lengths.append(length)
                for name, value in sample.items():
                    if (shape := _shape(value)) is None:
                        continue
                    name = RENAMED.get(name, name)
                    seen.setdefault(name, set()).add((length, shape))
                    if len(shape) == 1 and is_label(name, label_names):
                        labels.setdefault(name, []).append(shape[0])
                if time.monotonic() - started > budget:
                    raise Unread(f"{len(lengths)} samples took {budget:g} s to read, so their lengths stay unknown")
    except Unread:
        raise
    except Exception as error:  # the user's code; the host meets it where it draws this sample
        raise Unread(f"sample {len(lengths)} cannot be read ({type(error).__name__})") from error
    forms = {name: form_of(pairs) for name, pairs in seen.items()}
    own = next((name for name in labels if forms[name] is Form.OWN), "")
    if own and len(labels[own]) < len(lengths):
        forms[own], own = Form.UNCLEAR, ""
    return Survey(lengths, labels.get(own), forms) if lengths else None


def survey_dataset(dataset: Any, key: str, label_names: Collection[str] = ()) -> Survey | None:
    """A map-style dataset: its columns' own lengths where it has them, else sample after sample."""
    try:
        number = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    lengths = _column_lengths(dataset, key)
    if lengths is not None:
        step = -(-number // SEEN)
        found = survey((dataset[index] for index in range(0, number, step)), key, label_names)
        # a transform of the dataset may give samples that are not what its columns hold
        if found is not None and found.lengths == lengths[::step]:
            if found.label_lengths is None:
                return found._replace(lengths=lengths)
            for name in dataset.column_names:
                labels = _column_lengths(dataset, name) if is_label(name, label_names) else None
                if labels is not None and labels[::step] == found.label_lengths:
                    return found._replace(lengths=lengths, label_lengths=labels)
    return survey((dataset[index] for index in range(number)), key, label_names)


def form_of(seen: Iterable[tuple[int, tuple[int, ...]]]) -> Form:
    """The form of a value from its shapes in samples of known length; samples of one length tell nothing."""
    pairs = set(seen)
    shapes = {shape for _, shape in pairs}
    if shapes == {()}:
        return Form.FIXED
    if len({length for length, _ in pairs}) < 2:
        return Form.UNCLEAR
    if len(shapes) == 1:
        return Form.FIXED
    if all(shape[:1] == (length,) and length not in shape[1:] for length, shape in pairs):
        return Form.ALONG
    return Form.OWN if all(len(shape) == 1 for shape in shapes) else Form.UNCLEAR


def most_positions(model: Any) -> list[int]:
    """Limits of the model's positions, as its config and its embeddings name them."""
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "encoder", "decoder"))]
    found = [getattr(part, name, None) for part in parts for name in POSITIONS]
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
                # some count positions from behind the padding's id, and so have fewer than rows
                found.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    return [number for number in found if isinstance(number, int) and number > 0]


def room(model: Any, tokenizer: Any) -> int:
    """Tokens up to which a batch may be padded beyond its longest sample; 0 where nothing is known."""
    found = most_positions(model)
    if not found:
        return sys.maxsize if type(model).__module__.startswith("transformers.models.") else 0
    return min([*found, getattr(tokenizer, "model_max_length", None) or sys.maxsize])


@contextmanager
def _random_kept() -> Iterator[None]:
    """Looking at samples leaves no trace: a data set may draw random numbers for each (augmentation)."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):  # a forked process has no other device
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, an array, a list or a number; None for text and everything else."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, (int, float)):
        return ()
    if not isinstance(value, (list, tuple)):
        return None
    inner = _shape(value[0]) if value else ()
    return None if inner is None else (len(value), *inner)


def is_hf_dataset(dataset: Any) -> bool:
    """Whether it is a map-style data set of `datasets`."""
    try:
        import datasets
    except ImportError:
        return False
    return isinstance(dataset, datasets.Dataset)


def _column_lengths(dataset: Any, name: str) -> list[int] | None:
    """Lengths of the lists in a column of a `datasets.Dataset`, without reading the lists."""
    if not is_hf_dataset(dataset) or name not in dataset.column_names or not len(dataset):
        return None
    import pyarrow as pa
    import pyarrow.compute as pc

    column = dataset.select_columns([name]).with_format("arrow")[:].column(name)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        return None
    return [int(length) for length in pc.list_value_length(column).to_pylist()]
