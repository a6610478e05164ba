"""What an evaluation of the Trainer keeps: the predictions of all samples, named before they fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from integrations.huggingface.patches import Held

GIB = 1024**3


class KeptPredictions:
    """Of one trainer.

    Args:
        trainer: the host's.
        free_gib: of a device, as its memory stands now.
        say: told in one line where the predictions will not fit.
    """

    def __init__(self, trainer: Any, free_gib: Callable[[torch.device], float], say: Callable[[str], None]) -> None:
        self.trainer, self.free_gib, self.say = trainer, free_gib, say

    @contextmanager
    def forecast(self, dataloader: Any) -> Iterator[None]:
        """Inside, the first batch that is predicted tells what all of them will take; nothing is run for it."""
        try:
            samples = len(dataloader.dataset)
        except (AttributeError, TypeError):  # a stream: nobody knows its length
            samples = 0
        if not samples or getattr(self.trainer, "preprocess_logits_for_metrics", None) is not None:
            yield  # what the user makes of them is small, or not known
            return
        scoped, told = Held(self.trainer), False

        def prediction_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal told
            found = original(*args, **kwargs)
            if not told and isinstance(found, tuple) and len(found) == 3:
                told = True
                self._check(list(_tensors(found[1])), samples)
            return found

        scoped.method("prediction_step", prediction_step)
        try:
            yield
        finally:
            scoped.undo()

    def _check(self, logits: list[Tensor], samples: int) -> None:
        rows = len(logits[0]) if logits and logits[0].dim() else 0
        if not rows:
            return
        args = self.trainer.args
        needed = samples * sum(t.numel() * t.element_size() for t in logits) / rows / GIB
        where = args.device if args.eval_accumulation_steps is None else torch.device("cpu")
        free = self.free_gib(where)
        if needed <= free:
            return
        shapes = ", ".join(str(list(t.shape[1:])) for t in logits[:3])
        cpu = where.type != "cpu" and needed < self.free_gib(torch.device("cpu"))
        moved = "eval_accumulation_steps=16 keeps them on the CPU, " if cpu else ""
        self.say(
            f"evaluation keeps all predictions: {samples} samples x {shapes} take {needed:.3g} GiB, {free:.3g} GiB are "
            f"free on {where.type}; {moved}preprocess_logits_for_metrics makes them small (argmax), "
            "prediction_loss_only=True keeps none"
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
