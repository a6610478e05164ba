"""Evaluation and prediction in the Trainer: averaged weights, true means, the data's own order, ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from integrations.huggingface.collator import PlacedDataset
from integrations.huggingface.data import Loaders
from integrations.huggingface.evaluation_memory import KeptPredictions
from integrations.huggingface.loss_scaling import Losses
from integrations.huggingface.patches import of_library


def run(
    original: Callable[..., Any],
    trainer: Any,
    losses: Losses,
    loaders: Loaders,
    kept: KeptPredictions,
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: Any = None,
    metric_key_prefix: str = "eval",
) -> Any:
    """The trainer's `evaluation_loop`, with its loss and its order put right.

    A loop that the user wrote has the data in its own order, and its figures are its own.
    """
    own = not of_library(original)
    if own:
        losses.approximate("the trainer's own evaluation_loop: its loss is as it gives it")
    else:
        dataloader = loaders.for_evaluation(dataloader)
    order = _order(dataloader)
    metrics, names = trainer.compute_metrics, set[str]()

    def measured(prediction: Any, **more: Any) -> Any:
        found = metrics(prediction if order is None else _reordered(prediction, order), **more)
        names.update(found or ())
        return found

    losses.evaluation.begin()
    try:
        if metrics is not None:
            trainer.compute_metrics = measured
        with unprepared(trainer), kept.forecast(dataloader):
            output = original(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
    finally:
        trainer.compute_metrics = metrics
    mean = None if own else losses.evaluation.mean(trainer.args.device)
    theirs = "loss" in names  # a metric of the user's of this name takes the place of the loss
    if mean is not None and not theirs and f"{metric_key_prefix}_loss" in (output.metrics or {}):
        output.metrics[f"{metric_key_prefix}_loss"] = mean
    if order is None:
        return output
    return output._replace(predictions=reorder(output.predictions, order), label_ids=reorder(output.label_ids, order))


def reestimate(trainer: Any, rule: Callable[..., Any], micro_batches: Sequence[Any]) -> None:
    """batchnorm=precise: running statistics over the last window's data, with the weights to be evaluated.

    Args:
        trainer: the host's.
        rule: of the core; takes the model, the micro-batches and how one of them runs through it.
        micro_batches: of the last window, as the host fetched them.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    rule(model, micro_batches, lambda batch: trainer.model(**trainer._prepare_inputs(batch)))


@contextmanager
def unprepared(trainer: Any) -> Iterator[None]:
    """Leave no trace of an evaluation outside training.

    The host prepares the model for evaluation only and marks it as prepared; a later `train()` then skips the
    wrapping for several ranks, and these train apart from each other.
    """
    model, accelerator = trainer.model, trainer.accelerator
    own = vars(model)
    if trainer.is_in_train or own.get("_is_accelerate_prepared") or trainer.model_wrapped is not model:
        yield
        return
    forward = own.get("forward")
    try:
        yield
    finally:
        for name in ("_is_accelerate_prepared", "_original_forward", "forward"):
            own.pop(name, None)
        if forward is not None:
            own["forward"] = forward
        accelerator._models = [m for m in accelerator._models if m is not model]


def reorder(nested: Any, order: Sequence[int]) -> Any:
    """Rows of arrays, also inside tuples and dicts, from the order of visits to the data's own order."""
    if isinstance(nested, np.ndarray):
        if nested.ndim == 0 or len(nested) != len(order):
            return nested
        back = np.empty(len(order), dtype=np.int64)
        back[np.asarray(order)] = np.arange(len(order))
        return nested[back]
    if isinstance(nested, (list, tuple)):
        return type(nested)(reorder(part, order) for part in nested)
    if isinstance(nested, dict):
        return {key: reorder(part, order) for key, part in nested.items()}
    return nested


def _reordered(prediction: Any, order: Sequence[int]) -> Any:
    for name in ("predictions", "label_ids", "inputs", "losses"):
        if getattr(prediction, name, None) is not None:
            setattr(prediction, name, reorder(getattr(prediction, name), order))
    if hasattr(prediction, "elements"):
        prediction.elements = tuple(reorder(part, order) for part in prediction.elements)
    return prediction


def _order(dataloader: Any) -> list[int] | None:
    dataset = getattr(dataloader, "dataset", None)
    return dataset.order() if isinstance(dataset, PlacedDataset) and dataset.order is not None else None
