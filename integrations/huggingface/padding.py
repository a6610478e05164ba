"""Where more padding than the host's own would change a result, or a user's own choice of length."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from integrations.huggingface.lengths import Survey, length_of, own_labels, survey_dataset
from integrations.huggingface.patches import of_host

ANSWERS = ("start_positions", "end_positions")
"""Positions in the input; the host's heads ignore one that lies behind the input's end."""


def covers_padding(model: Any, names: Collection[str] = ()) -> bool:
    """True for a loss over positions, padded ones too: question answering, whose softmax runs over the length.

    `names` are those of a sample's values.
    """
    return bool(re.search(r"For\w*QuestionAnswering", type(_base(model)).__name__)) or set(ANSWERS) <= set(names)


def covers_unequal_padding(model: Any, batches: Sequence[Any]) -> bool:
    """Whether the loss of a window covers padding, and its micro-batches [B, L] differ in length."""
    first = [
        next((v for v in b.values() if isinstance(v, torch.Tensor)), None) for b in batches if isinstance(b, Mapping)
    ]
    lengths = {value.shape[1] for value in first if value is not None and value.dim() > 1}
    return len(lengths) > 1 and covers_padding(model, batches[0])


def takes_mask(model: Any) -> bool | None:
    """Whether `forward` names an attention mask; None where it may be among its other keywords."""
    parameters = inspect.signature(_base(model).forward).parameters
    if "attention_mask" in parameters:
        return True
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else False


def unknown(trainer: Any) -> str:
    """What of this trainer's loss a user wrote, and so may read padding; empty where all of it is the host's."""
    model = _base(trainer.model)
    author = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    if not of_host(trainer.compute_loss):
        return "compute_loss is your own"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is your own"
    if not author.__module__.startswith("transformers.") or "_loss_function" in vars(model):
        return f"{type(model).__name__}'s loss is your own"
    return ""


def look_at(
    dataset: Any, parts: Callable[[], tuple[Any, Any]], key: str, label_names: Collection[str], size: int
) -> Survey | None:
    """What a map-style dataset's samples say, and how its collator pads; it asks both, so only ever a copy.

    Args:
        dataset: the samples; one without a length gives None.
        parts: gives the dataset and the collator of the host's own loader.
        key: name of the value whose length is the sample's.
        label_names: names of the values that are labels.
        size: samples of a batch.
    """
    found = survey_dataset(dataset, key, label_names)
    if found is None or len(set(found.lengths)) < 2:
        return found
    dataset, collate = parts()
    places = telling_batches(found.lengths, size)
    batches = [[dataset[index] for index in place] for place in places]
    again = [length_of(sample, key) for batch in batches for sample in batch]
    if again != [found.lengths[index] for place in places for index in place]:
        return found._replace(against="a sample's length changes from one reading to the next")
    try:
        own = own_length(collate, batches, [key, *own_labels(found, label_names)])
    except Exception as error:  # the user's code, asked for other batches than the host's
        return found._replace(against=f"the collator fails on sorted samples ({type(error).__name__})")
    return found._replace(against="the collator pads by a rule of its own") if own else found


def own_length(collate: Callable[[list[Any]], Any], batches: Sequence[list[Any]], lengths: Sequence[str]) -> bool:
    """True where a collator pads by a rule of its own and not to a batch's longest: to a fixed length, to a multiple.

    Args:
        collate: asked for every one of `batches`, so only ever a copy is given.
        batches: lists of samples.
        lengths: the values [B, L] that are to be as long as a batch's longest.
    """
    for batch in batches:
        longest = {name: max(length_of(sample, name) or 0 for sample in batch) for name in lengths}
        found = collate(batch)
        for name, length in longest.items():
            made = found.get(name) if hasattr(found, "get") else None
            if not isinstance(made, torch.Tensor) or made.shape[1:] != (length,):
                return True
    return False


def telling_batches(lengths: Sequence[int], size: int, most: int = 64) -> list[list[int]]:
    """Up to four batches for `own_length`, as indices, none twice: of the shortest samples to the longest."""
    ordered, size = sorted(range(len(lengths)), key=lengths.__getitem__), min(size, most)
    last, end, found = max(len(ordered) - size, 0), 0, []
    for start in (0, last // 3, 2 * last // 3, last):
        if start >= end:
            end = start + size
            found.append(ordered[start:end])
    return found


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
