"""How many terms a head's loss is the mean of: the number that makes accumulation exact.

The loss of a micro-batch is a mean over n terms (tokens, samples, pixels). The gradient of one big batch is the
mean over all of the window's terms, so a micro-batch weighs n / N. n follows from the head's own loss: see
`transformers.loss.loss_utils` and the heads' forward methods (5.24).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100

# Causal language models whose head does not shift the labels.
UNSHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel")

SUM = "sum"
"""The loss is a sum over samples: micro-batches add up as they are."""


@dataclass(frozen=True)
class Counting:
    """A rule that counts the terms of a batch.

    Attributes:
        kind: tokens, shifted tokens, samples, values, positions, pixels, or sum.
        ignore: the label that does not count.
        inexact: names of loss terms that this count cannot make exact.
    """

    kind: str
    ignore: int = IGNORED
    inexact: tuple[str, ...] = ()

    def count(self, batch: Mapping[str, Any]) -> int | None:
        """Terms of one batch; None where the batch has no labels that can be counted."""
        found = self._terms(batch)
        return int(found) if isinstance(found, Tensor) else found

    def count_there(self, batch: Mapping[str, Any]) -> Tensor | int | None:
        """As `count`; of labels on a device a 0-dim tensor there, which the host does not wait for."""
        return here(self._terms(batch))

    def _terms(self, batch: Mapping[str, Any]) -> Tensor | int | None:
        """Of one batch, where its labels are."""
        if self.kind == SUM:
            return samples(batch)
        if self.kind == "positions":
            found = _positions(batch)
            return found[0] if found is not None else None
        labels = batch.get("labels")
        if self.kind == "samples":
            return samples(batch)
        if not isinstance(labels, Tensor):
            return None
        if self.kind == "shifted tokens":
            labels = batch["shift_labels"] if "shift_labels" in batch else labels[..., 1:]
        if self.kind == "values":
            return labels.numel()
        return (labels != self.ignore).sum()

    def ignoring(self, batch: Mapping[str, Any], stop: int) -> dict[str, Any] | None:
        """The batch with no terms in its rows from `stop` on; None where a loss of this kind cannot ignore a row."""
        names = [name for name in ("labels", "shift_labels") if isinstance(batch.get(name), Tensor)]
        if self.kind not in ("tokens", "shifted tokens", "pixels") or not names:
            return None
        hidden = {name: batch[name].clone() for name in names}
        for labels in hidden.values():
            labels[stop:] = self.ignore
        return {**batch, **hidden}

    def loses(self, batch: Mapping[str, Any]) -> Tensor | int | None:
        """Whether answers lie outside the input at one end but not at the other: they are counted by their start.

        Of labels on a device a 0-dim tensor there.
        """
        found = _positions(batch) if self.kind == "positions" else None
        return None if found is None else here(found[0] != found[1])


def for_model(model: Any, batch: Mapping[str, Any] | None = None, smoothing: bool = False) -> Counting | None:
    """The rule of a known head; None for a head or loss that is not known.

    Args:
        model: the bare model (a peft wrapper is looked through).
        batch: a batch with labels; decides between classification and regression where the config does not.
        smoothing: the host's label smoother replaces the head's own loss.
    """
    model = base(model)
    name, config = _author(model), getattr(model, "config", None)
    if config is None or not name or not hasattr(model, "save_pretrained"):
        return None
    inexact = _auxiliary(config)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    if re.search(r"For(CausalLM|ConditionalGeneration)$|LMHeadModel$", name) and name not in UNSHIFTED:
        causal = not encoder_decoder and (not smoothing or _smoother_shifts(name))
        return Counting("shifted tokens" if causal else "tokens", inexact=inexact)
    if re.search(r"For(MaskedLM|TokenClassification|MultipleChoice|NextSentencePrediction)$", name):
        return Counting("tokens", inexact=inexact)
    if re.search(r"For(Sequence|Image|Video|Audio)Classification$", name):
        return Counting(_classification(config, batch), inexact=inexact)
    if name.endswith("ForQuestionAnswering") and (batch is None or "start_positions" in batch):
        return Counting("positions", inexact=inexact)
    if name.endswith("ForSemanticSegmentation"):
        return Counting("pixels", ignore=getattr(config, "semantic_loss_ignore_index", 255), inexact=inexact)
    if name.endswith("ForCTC"):
        return Counting(SUM if getattr(config, "ctc_loss_reduction", "sum") == "sum" else "samples")
    if name.endswith("ForPreTraining") and batch is not None and "next_sentence_label" in batch:
        return Counting("tokens", inexact=("next sentence loss: a second mean beside the masked tokens'", *inexact))
    return None


def problem_type(config: Any, labels: Tensor) -> str:
    """The loss that a classification head chooses from its labels, as the host's heads choose it in forward."""
    if getattr(config, "problem_type", None):
        return str(config.problem_type)
    if config.num_labels == 1:
        return "regression"
    whole = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if whole else "multi_label_classification"


def candidates(batch: Mapping[str, Any]) -> Sequence[Counting]:
    """Rules worth trying for a loss that is not known, the likeliest first."""
    labels = batch.get("labels")
    tokens = isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point()
    if tokens:
        found = [Counting(kind) for kind in ("tokens", "shifted tokens", "samples", "values", SUM)]
        return [*found, Counting("pixels", ignore=255)] if batch["labels"].dim() > 2 else found
    return [Counting("samples"), Counting(SUM)]


def here(number: Tensor | int | None) -> Tensor | int | None:
    """A 0-dim tensor on the CPU as the number that it holds; one on a device as it is."""
    return int(number) if isinstance(number, Tensor) and number.device.type == "cpu" else number


def at_least_one(number: Tensor | float) -> Tensor | float:
    """`max(number, 1)`, where it is."""
    return number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1)


def samples(batch: Mapping[str, Any]) -> int:
    """The batch size: dim 0 of the first tensor."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim():
            return int(value.shape[0])
    return 1


def base(model: Any) -> Any:
    """The host's model inside peft wrappers."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def _author(model: Any) -> str:
    """The class whose forward, and hence whose loss, this is; empty where it is not one of the host's."""
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    return owner.__name__ if owner.__module__.startswith("transformers.") else ""


def _classification(config: Any, batch: Mapping[str, Any] | None) -> str:
    labels = (batch or {}).get("labels")
    if not isinstance(labels, Tensor):
        return "tokens"
    # single label: the mean skips -100; regression and multi-label: the mean of all values
    return "tokens" if problem_type(config, labels) == "single_label_classification" else "values"


def _positions(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Start and end positions inside the input [B, L], where there are any; the head ignores those outside."""
    length = next(
        (int(batch[k].shape[1]) for k in ("input_ids", "inputs_embeds") if isinstance(batch.get(k), Tensor)), 0
    )
    start, end = (batch.get(name) for name in ("start_positions", "end_positions"))
    if not isinstance(start, Tensor) or not isinstance(end, Tensor):
        return None
    # the head clamps to [0, L] and ignores L
    return (start < length).sum(), (end < length).sum()


def _smoother_shifts(name: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _auxiliary(config: Any) -> tuple[str, ...]:
    if getattr(config, "output_router_logits", False):
        return ("router auxiliary loss: depends on the whole batch",)
    return ()
