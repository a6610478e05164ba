"""Exact accumulation in the Trainer: what each micro-batch's loss is multiplied by, and the true means.

The host fetches all micro-batches of a window before the first forward and asks `_get_num_items_in_batch` for
their count. There the terms of every micro-batch are counted and summed over ranks, once. `compute_loss` is then
asked for the micro-batch's own mean (no count is passed, so heads that take one and heads that ignore it agree)
and gets its weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from integrations.huggingface import counting
from integrations.huggingface.counting import SUM, Counting
from integrations.huggingface.probing import HOST, LATER, TOLERANCE, fits, probe, take_rows
from integrations.layout import DTYPES


class Losses:
    """The rule in force for one trainer, and the weights of the window at hand.

    Args:
        trainer: the host's.
        exact: False leaves everything to the host (normalise=host).
        approximate: told, once each, what accumulation cannot make exact.
    """

    def __init__(self, trainer: Any, exact: bool, approximate: Callable[[str], None]) -> None:
        self.trainer, self.exact, self.approximate = trainer, exact, approximate
        self.rule: Counting | None = None
        self.host_way = not exact
        self.known = not exact
        self.seam: Any = None
        self._custom = False  # the rule was measured
        self._windows = 0
        self._counts: deque[int] = deque()
        self._count: int | None = None  # of the micro-batch at hand, and what its mean is multiplied by
        self._weight: Tensor | float = 1.0
        self._window: list[tuple[int, Tensor]] = []  # (micro-batch from 1, loss)
        self._micro_batch = 0
        self._total = 0
        # evaluation: the sum over terms and the terms, since `begin_evaluation`
        self._sum, self._terms, self._asked_for = 0.0, 0, False

    # -- the rule ----------------------------------------------------------------------------------------------

    def find_rule(self, batches: Sequence[Any], compute_loss: Callable[..., Any]) -> None:
        """Decide once, on the first batches, how this run's loss is counted."""
        if self.known or not batches or not isinstance(batches[0], (dict, counting.Mapping)):
            return
        self.known = True
        trainer, batch = self.trainer, dict(batches[0])
        custom = _overridden(compute_loss) or trainer.compute_loss_func is not None or _own_loss(trainer.model)
        if trainer.args.n_gpu > 1:
            self._leave("DataParallel replicas: start one process a device with torchrun")
        elif not custom:
            smoothing = trainer.label_smoother is not None and "labels" in batch
            rule = counting.for_model(trainer.model, batch, smoothing)
            if rule is not None and (rule.inexact or self._holds(rule, batches, compute_loss)):
                self.rule = rule
                for term in rule.inexact:
                    self.approximate(term)
                return
        if not self.host_way:
            self._custom = True
            self._probe(batches, compute_loss, custom)

    def check_rule(self, batches: Sequence[Any], compute_loss: Callable[..., Any]) -> None:
        """A rule that was found by measuring may fit the first batch by chance: look again, ever more rarely."""
        self._windows += 1
        again = self._custom and self.rule is not None and self._windows & (self._windows - 1) == 0
        if again and not self._holds(self.rule, batches, compute_loss):  # type: ignore[arg-type]
            self.rule = None
            self._leave("the loss adds up in another way than on the first batch")

    def _holds(self, rule: Counting, batches: Sequence[Any], compute_loss: Callable[..., Any]) -> bool:
        """False only where the loss was seen to add up in another way."""
        ask, batch, model = self._asked(batches, compute_loss)
        return _of_first_rank(fits(ask, batch, model, rule, self._tolerance(model))) is not False

    def _probe(self, batches: Sequence[Any], compute_loss: Callable[..., Any], custom: bool) -> None:
        ask, batch, model = self._asked(batches, compute_loss)
        found = _of_first_rank(probe(ask, batch, model, self._tolerance(model)))
        if found == LATER:
            self.known = False
        elif isinstance(found, Counting):
            self.rule = found
        elif found == HOST:
            self.host_way = True
        else:
            what = "compute_loss" if custom else f"the loss of {type(counting.base(model)).__name__}"
            self._leave(f"{what} hides how many terms its mean has")

    def _asked(self, batches: Sequence[Any], compute_loss: Callable[..., Any]) -> tuple[Any, dict[str, Any], Any]:
        """(the loss as a function of inputs and a count, the largest micro-batch, the model)."""
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        batch = trainer._prepare_inputs(_widest(batches))

        def ask(inputs: dict[str, Any], number: Any) -> Tensor:
            # the host multiplies by the number of processes only where it passes a count to a loss that takes one
            with self.seam.validation() if self.seam is not None else nullcontext():  # no graph for the compiler
                loss = compute_loss(model, inputs, num_items_in_batch=number)
            scaled = number is not None and trainer.args.average_tokens_across_devices
            takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
            return loss / (trainer.accelerator.num_processes if scaled and takes else 1)

        return ask, batch, model

    def _tolerance(self, model: Any) -> float:
        """Relative; what rounding in the run's precision may change of a loss, and a little more."""
        mixed = DTYPES.get(self.trainer.accelerator.mixed_precision)
        dtype = mixed or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return max(TOLERANCE, 4 * torch.finfo(dtype).eps)

    def _leave(self, reason: str) -> None:
        self.host_way = True
        self.approximate(f"{reason}; weighted as the host does")

    @property
    def weighs(self) -> bool:
        return self.rule is not None and not self.host_way

    # -- training ----------------------------------------------------------------------------------------------

    def begin_window(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        """Count the window. Replaces the trainer's `_get_num_items_in_batch`; returns what the host passes on."""
        self._counts.clear()
        self._window.clear()
        self._micro_batch = 0
        if not self.weighs or self.rule is None or not batches:
            return original(batches, device)
        counts = self.rule.count_all(batches)
        if any(count is None for count in counts):
            self._leave("a batch without labels")
            return original(batches, device)
        for batch in batches:
            if lost := self.rule.lost(batch):
                self.approximate(lost)
        self._counts.extend(count or 0 for count in counts)
        self._total = _over_ranks(sum(self._counts), device)
        if self.seam is not None:
            self.seam.window.announce(self._total, _world())
        return None

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around a training step, which may ask for the loss more than once (adversarial training)."""
        self._micro_batch += 1
        if self.weighs and self._counts and self.rule is not None:
            self._count = self._counts.popleft()
            if self._count or self.rule.kind == SUM:
                self._weight = float(_world()) if self.rule.kind == SUM else self.seam.mean(self._count)
        try:
            yield
        finally:
            self._count = None

    def training_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`compute_loss` of a micro-batch: its own mean, times its weight. Sums over the window to the true mean."""
        if self._count is None or self.rule is None:
            return self._noted(original(model, inputs, *args, **kwargs))
        kwargs["num_items_in_batch"] = None
        if not self._count and self.rule.kind != SUM:
            return self._noted(_no_terms(original, model, inputs, kwargs))
        found = original(model, inputs, *args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        if not isinstance(self._weight, float) or self._weight != 1.0:
            loss = loss * self._weight
        self._noted(loss)
        return (loss, *found[1:]) if isinstance(found, tuple) else loss

    def _noted(self, found: Any) -> Any:
        self._window.append((self._micro_batch, (found[0] if isinstance(found, tuple) else found).detach()))
        return found

    def not_finite(self) -> list[int]:
        """Micro-batches of this window, counted from 1, whose loss was NaN or infinite."""
        return sorted({number for number, loss in self._window if not bool(torch.isfinite(loss).all())})

    # -- evaluation --------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        self._sum, self._terms, self._asked_for = 0.0, 0, False

    def evaluation_count(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        """No count in evaluation: every batch gives its own mean, which is weighed afterwards."""
        return None if self.weighs else original(batches, device)

    def evaluation_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.weighs:
            kwargs["num_items_in_batch"] = None
        return original(model, inputs, *args, **kwargs)

    def prediction_step(
        self,
        original: Callable[..., Any],
        compute_loss: Callable[..., Any],
        model: Any,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The host's prediction step; adds the batch's loss to the evaluation's sum."""
        if not self.known:
            self.find_rule([inputs], compute_loss)
        batch = dict(inputs) if isinstance(inputs, counting.Mapping) else {}
        loss, logits, labels = original(model, inputs, *args, **kwargs)
        if loss is not None and self.weighs and self.rule is not None:
            loss = self._add(loss, batch, model, compute_loss)
        return loss, logits, labels

    def _add(self, loss: Tensor, batch: dict[str, Any], model: Any, compute_loss: Callable[..., Any]) -> Tensor:
        assert self.rule is not None
        rows, valid = counting.samples(batch), self._rows_of_this_rank(counting.samples(batch))
        if valid < rows:
            # The host completes the last step of several ranks with samples that were seen already.
            if valid:
                part = self.trainer._prepare_inputs(take_rows(batch, 0, valid))
                with torch.no_grad():
                    loss = compute_loss(model, part, num_items_in_batch=None).detach().mean()
            batch = take_rows(batch, 0, valid)
        count = self.rule.count(batch) if valid else 0
        self._asked_for = True
        if not count:
            return torch.zeros_like(loss)
        value = float(loss)
        self._sum += value if self.rule.kind == SUM else value * count
        self._terms += count
        return loss

    def _rows_of_this_rank(self, rows: int) -> int:
        state = self.trainer.accelerator.gradient_state
        if _world() == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return max(0, min(rows, state.remainder - self.trainer.args.process_index * rows))

    def evaluation_mean(self, device: torch.device) -> float | None:
        """The true mean over all terms of all ranks, NaN over none; None where the host's figure stands."""
        if not self.weighs or not self._asked_for:
            return None
        both = torch.tensor([self._sum, float(self._terms)], dtype=torch.float64, device=device)
        if _world() > 1:
            dist.all_reduce(both)
        return float(both[0] / both[1])


def _no_terms(compute: Callable[..., Any], model: Any, inputs: Any, kwargs: dict[str, Any]) -> Tensor:
    """A loss of zero that reaches the same parameters: a mean over no term at all would be NaN."""
    found = compute(model, inputs, **{**kwargs, "return_outputs": True})
    if not isinstance(found, tuple):  # a compute_loss that never gives its outputs
        touched = [parameter.sum() * 0.0 for parameter in model.parameters() if parameter.requires_grad]
        return sum(touched, torch.zeros((), device=found.device))
    outputs = found[1]
    values = outputs.values() if isinstance(outputs, counting.Mapping) else outputs
    logits = [v for v in values if isinstance(v, Tensor) and v.dim() and v.is_floating_point() and v.requires_grad]
    return sum((v.float().sum() * 0.0 for v in logits), torch.zeros((), device=found[0].device))


def _widest(batches: Sequence[Any]) -> dict[str, Any]:
    """The micro-batch of most samples; of single samples two together, where they have one shape."""
    widest = max((dict(batch) for batch in batches), key=counting.samples)
    if counting.samples(widest) > 1 or len(batches) < 2:
        return widest
    try:
        return {name: torch.cat([batch[name] for batch in batches[:2]]) for name in widest}
    except (TypeError, RuntimeError, KeyError):
        return widest


def _overridden(compute_loss: Any) -> bool:
    """True where a subclass, or the user on this very trainer, brings a compute_loss."""
    from transformers import Trainer

    return getattr(compute_loss, "__func__", None) is not Trainer.compute_loss


def _own_loss(model: Any) -> bool:
    """True where the user gave the model a loss function of their own."""
    return "_loss_function" in vars(counting.base(model))


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _of_first_rank(found: Any) -> Any:
    """Ranks measure on batches of their own, and have to follow one rule: counting is a collective."""
    if _world() == 1:
        return found
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _over_ranks(count: int, device: torch.device) -> int:
    if _world() == 1:
        return count
    total = torch.tensor(count, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)
