"""`eval_loss` as the true mean over all terms, of what the host's own calls came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from integrations.huggingface.loss_rules import counting, observation
from integrations.huggingface.loss_rules.counting import SUM
from integrations.huggingface.loss_rules.evidence import Evidence, over_ranks, ranks
from integrations.huggingface.loss_rules.find_rule import multiplied, own_count, tolerance
from integrations.huggingface.loss_rules.followed_count import Trace, follow
from integrations.huggingface.loss_rules.head_probe import invisible_copy, take_rows
from integrations.huggingface.loss_rules.observation import OF_THE_HOST, RULES, Seen, Way, watching
from integrations.huggingface.patches import of_library, passes_on


class EvaluationLoss:
    """Sums of one evaluation.

    Args:
        losses: says whose loss it is, and the rule of a library's head.
    """

    def __init__(self, losses: Any) -> None:
        self.losses = losses
        self.begin()

    @property
    def _trainer(self) -> Any:
        return self.losses.trainer

    def begin(self) -> None:
        """An evaluation begins."""
        self._sum, self._terms, self._asked = 0.0, 0, False
        self._latest: Tensor | None = None  # what `compute_loss` gave last
        self._inputs: Any = None  # and what it was given
        self._own = 0  # losses that a prediction step of the user's own made in another way
        self._evidence: Evidence | None = None
        self._totals = [[0.0, 0.0] for _ in RULES]  # sum and terms by each rule of a loss that the user wrote

    def number(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        """The count that the host passes: none to a library's head, which gives its own mean; it is weighed later."""
        return None if self.losses.weighs else original(batches, device)

    @contextmanager
    def watched(self, model: Any, inputs: Any, args: Any, kwargs: Any) -> Iterator[Seen]:
        """A call of the user's loss: `kwargs` get the host's count in a form that can be followed."""
        number, trace = kwargs.get("num_items_in_batch"), Trace(used=any(isinstance(a, Tensor) for a in args))
        with watching(model, inputs, number) as seen:
            seen.trace = trace
            if number is not None:
                kwargs["num_items_in_batch"] = follow(number, trace)
            yield seen

    def loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`compute_loss` of an evaluation batch."""
        if self.losses.weighs:
            kwargs["num_items_in_batch"] = None
        if not self.losses.observes:
            found = original(model, inputs, *args, **kwargs)
            self._inputs = inputs
            self._latest = (found[0] if isinstance(found, tuple) else found).detach()
            return found
        with self.watched(model, inputs, args, kwargs) as seen:
            found = original(model, inputs, *args, **kwargs)
        self._add_seen(found[0] if isinstance(found, tuple) else found, seen)
        return found

    def prediction_step(
        self,
        original: Callable[..., Any],
        compute_loss: Callable[..., Any],
        model: Any,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The host's prediction step; adds the loss of a library's head to the evaluation's sum.

        A prediction step of the user's own may give something else as its loss, which then stays.
        """
        self.losses.find_rule([inputs], compute_loss)
        batch = dict(inputs) if isinstance(inputs, counting.Mapping) else {}
        hidden = self._without_repeats(batch) if of_library(original) else None
        self._latest = None
        loss, logits, labels = original(model, inputs if hidden is None else hidden, *args, **kwargs)
        if hidden is not None and isinstance(labels, Tensor) and self._trainer.label_names == ["labels"]:
            labels = batch["labels"].to(labels.device)  # for the user's metrics, as the data has them
        if loss is not None and self.losses.weighs:
            if of_library(original) or (self._latest is not None and bool((loss == self._latest.mean()).all())):
                if hidden is None and not passes_on(self._trainer):
                    batch = dict(self._inputs)  # with the labels that the user's method left
                loss = self._add(loss, batch, hidden, compute_loss)
            else:
                self._asked, self._own = True, self._own + 1
        return loss, logits, labels

    def _without_repeats(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """The last step of several ranks without what the host completes it with: samples that were seen already.

        None for any other step, and for a loss that cannot ignore a row.
        """
        rows = counting.samples(batch)
        valid = self._rows_of_this_rank(rows) if self.losses.weighs else rows
        found: dict[str, Any] | None = self.losses.rule.ignoring(batch, valid) if valid < rows else None
        return found

    def _add(
        self, loss: Tensor, batch: dict[str, Any], hidden: dict[str, Any] | None, compute_loss: Callable[..., Any]
    ) -> Tensor:
        rule = self.losses.rule
        rows = counting.samples(batch)
        valid = rows if hidden is not None else self._rows_of_this_rank(rows)
        batch = batch if hidden is None else hidden
        if valid < rows:
            if valid and (copied := invisible_copy(self._trainer.accelerator.unwrap_model(self._trainer.model))):
                part = send_to_device(take_rows(batch, 0, valid), self._trainer.args.device)
                with torch.no_grad(), torch.random.fork_rng(), self._trainer.accelerator.autocast():
                    loss = compute_loss(copied, part, num_items_in_batch=None).detach().mean()
            batch = take_rows(batch, 0, valid)
        count = rule.count(batch) if valid else 0
        self._asked = True
        if not count:
            return torch.zeros_like(loss)
        value = float(loss)
        self._sum += value if rule.kind == SUM else value * count
        self._terms += count
        return loss

    def _add_seen(self, loss: Tensor, seen: Seen) -> None:
        """Every rule's sum and terms: which one holds is known at the end."""
        if self._evidence is None:
            self._evidence = Evidence(tolerance(self._trainer))
        accumulate = int(self._trainer.args.gradient_accumulation_steps)
        times = multiplied(self._trainer, self.losses.compute_loss, seen, self._evidence)
        self._evidence.note(loss / times, seen, accumulate, ranks())
        self._evidence.settle()
        self._asked = True
        valid = self._rows_of_this_rank(seen.size)
        counted = seen if valid >= seen.size else seen.rows(valid, take_rows)
        for at, rule in enumerate(RULES):
            if rule not in self._evidence.possible or not valid:
                continue
            if rule.form == OF_THE_HOST:
                total, terms = loss.detach() * seen.number, float(seen.number)
            else:
                found, terms = counted.total(rule.form), float(observation.count(rule.kind, counted.batch) or 0)
                total = torch.zeros(()) if found is None else found / (accumulate if rule.way is Way.SHARE else 1)
            if terms:
                self._totals[at][0] += float(total)
                self._totals[at][1] += terms

    def _rows_of_this_rank(self, rows: int) -> int:
        state = self._trainer.accelerator.gradient_state
        if ranks() == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return max(0, min(rows, state.remainder - self._trainer.args.process_index * rows))

    def mean(self, device: torch.device) -> float | None:
        """The true mean over all terms of all ranks, NaN over none; None where the host's figure stands."""
        if not self._asked:
            return None
        if self.losses.weighs:
            total, terms, own = over_ranks([self._sum, float(self._terms), float(self._own)], device)
            if own:
                return None
            return total / terms if terms else float("nan")
        if self._evidence is None:
            return None
        self._evidence.agree(device)
        sums = over_ranks([number for both in self._totals for number in both], device)
        for at, rule in enumerate(RULES):
            if rule.way is Way.COUNTED and own_count(self._trainer):
                continue
            if rule in self._evidence.possible and rule.way is not Way.SUM and sums[2 * at + 1]:
                return sums[2 * at] / sums[2 * at + 1]
        return None
