"""Exact accumulation in the Trainer: what each micro-batch's loss weighs, and the true means.

The host fetches all micro-batches of a window before the first forward and asks `_get_num_items_in_batch` for
their count. There the terms of every micro-batch are counted and summed over ranks, once.

Whose loss it is decides what is done. That of a library's head is known by its name, checked once on a copy of the
model, and asked for the micro-batch's own mean (no count is passed, so heads that take one and heads that ignore it
agree). A loss that the user wrote runs exactly as the host runs it, with the host's count; how it adds up is seen
in these calls. `gradient_scaling` then puts the gradient right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from integrations.contract import Session
from integrations.huggingface.deepspeed import is_deepspeed
from integrations.huggingface.evaluation_loss import EvaluationLoss
from integrations.huggingface.gradient_scaling import Scaling, Share, loss_of, no_terms, none_as_zero, says_scaled
from integrations.huggingface.loss_rules import counting, observation
from integrations.huggingface.loss_rules.counting import SUM, Counting, at_least_one
from integrations.huggingface.loss_rules.evidence import Evidence, over_ranks, ranks, sum_over_ranks
from integrations.huggingface.loss_rules.find_rule import (
    Finding,
    find_rule,
    multiplied,
    of_the_user,
    own_count,
    tolerance,
)
from integrations.huggingface.loss_rules.lost_terms import LostTerms
from integrations.huggingface.loss_rules.observation import KINDS, Rule, Seen, Way
from integrations.huggingface.loss_window import LossWindow
from integrations.huggingface.patches import passes_on
from integrations.huggingface.sharding import is_sharded

LEFT = "weighted as the host does"
CHANGED = "a micro-batch has other labels than when its window was counted"
NOTHING = Share(0.0)


class Losses:
    """The rule in force for one trainer, and the weights of the window at hand.

    Args:
        trainer: the host's.
        exact: False leaves everything to the host (normalise=host).
        approximate: told, once each, what accumulation cannot make exact.
    """

    def __init__(self, trainer: Any, exact: bool, approximate: Callable[[str], None]) -> None:
        self.trainer, self.exact, self.approximate = trainer, exact, approximate
        self.rule: Counting | None = None  # of a library's head
        self.finding = Finding.OPEN if exact else Finding.HOST
        self.session: Session | None = None
        self.scaling = Scaling(
            trainer, lambda: approximate("training_step scales the loss by a factor of its own, which stays")
        )
        self.evaluation, self.lost = EvaluationLoss(self), LostTerms(approximate)
        self.compute_loss: Any = None  # the trainer's own, without the plug's
        self._evidence: Evidence | None = None
        self._window = LossWindow()
        self._count: Tensor | int | None = None  # of the micro-batch at hand, for a library's head
        self._inside = False  # of a training step
        self._windows = 0
        self._left = False  # to the host

    # -- the rule ----------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """Whether it is decided how this run's loss is counted."""
        return self.finding is not Finding.OPEN

    @property
    def weighs(self) -> bool:
        """A library's head, whose terms are counted."""
        return self.finding is Finding.COUNTED

    @property
    def observes(self) -> bool:
        """A loss that the user wrote: it is only watched."""
        return self.finding is Finding.OBSERVED

    def find_rule(self, batches: Sequence[Any], compute_loss: Callable[..., Any]) -> None:
        """Decide once, on the first batches, how this run's loss is counted."""
        if self.known or not batches or not isinstance(batches[0], (dict, counting.Mapping)):
            return
        if self.trainer.args.n_gpu > 1:
            self._leave("DataParallel replicas: start one process a device with torchrun")
            return
        self.compute_loss = compute_loss
        self.finding, self.rule, inexact = find_rule(self.trainer, batches, compute_loss)
        for term in inexact:
            self.approximate(term)

    def _leave(self, reason: str) -> None:
        self.finding, self._left = Finding.HOST, True
        self.approximate(f"{reason}; {LEFT}")

    # -- training ----------------------------------------------------------------------------------------------

    def begin_window(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        """Count the window. Replaces the trainer's `_get_num_items_in_batch`; returns what the host passes on."""
        self._window = LossWindow(len(batches))
        self._windows += 1
        if self.weighs and batches:
            return self._count_terms(original, batches, device)
        number = original(batches, device)
        if self.observes and batches:
            found = [[observation.count(kind, batch) for batch in batches] for kind in KINDS]
            self._window.fetched = dict(zip(KINDS, found, strict=True))
            sums = [float("nan") if None in counts else float(sum(counts)) for counts in found]  # type: ignore[arg-type]
            self._window.totals = dict(zip(KINDS, over_ranks(sums, device), strict=True))
            self._window.number = float(number) if isinstance(number, Tensor) else float(number or 0)
            self._look(lambda evidence: evidence.agree(device))
        return number

    def begin_again(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> None:
        """The window at hand is done again, in other micro-batches of the same samples."""
        self._windows -= 1
        self.begin_window(original, batches, device)

    @property
    def micro_batches(self) -> int:
        """Of the window at hand."""
        return self._window.micro_batches

    @property
    def hosts_sums(self) -> bool:
        """Whether the host's own sums stand, which may grow with the number of micro-batches."""
        return not self.exact or self._left

    def _count_terms(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        assert self.rule is not None
        counts = [count for batch in batches if (count := self.rule.count_there(batch)) is not None]
        if len(counts) < len(batches):
            self._leave("a batch without labels")
            return original(batches, device)
        self.lost.look(self.rule, batches)
        self._window.counts.extend(counts)
        self._window.total = at_least_one(sum_over_ranks(sum(counts), device))
        if self.session is not None:
            self.session.window.announce(self._window.total, ranks())
        return None

    @contextmanager
    def micro_batch(self, training_step: Any) -> Iterator[None]:
        """Around a training step, which may ask for the loss more than once (adversarial training)."""
        self._window.at += 1
        self._count = self._window.counts.popleft() if self._window.counts else None
        self._inside = True
        self.scaling.begin(training_step)
        try:
            yield
        finally:
            self._count, self._inside = None, False

    def training_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`compute_loss` of a micro-batch. Its value is its own; its backward brings its share of the window's mean."""
        window = self._window
        if not self._inside:
            return original(model, inputs, *args, **kwargs)
        if self._count is not None and self.rule is not None:
            kwargs["num_items_in_batch"] = None
            if window.micro_batches > 1 and not passes_on(self.trainer):
                self.lost.note(counting.here(self.rule.count_there(inputs) != self._count), CHANGED)
            empty = not isinstance(self._count, Tensor) and not self._count and self.rule.kind != SUM
            with observation.watching(model, inputs, None) if empty else nullcontext(Seen({})) as seen:
                found = original(model, inputs, *args, **kwargs)
            if isinstance(self._count, Tensor):
                found = none_as_zero(found, self._count)
            share: Share | None = None if empty else self._share_of(self.rule, self._count)
        elif self.observes and (window.micro_batches > 1 or ranks() > 1):
            with self.evaluation.watched(model, inputs, args, kwargs) as seen:
                found = original(model, inputs, *args, **kwargs)
            share = self._share_seen(loss_of(found), seen)
            empty = share == NOTHING and not bool(torch.isfinite(loss_of(found)).all())
        else:
            return self._noted(original(model, inputs, *args, **kwargs))
        if empty:
            return self._noted(no_terms(found, seen))
        if share is not None and (window.micro_batches > 1 or not share.whole):
            self.scaling.correct(loss_of(found), share, window.micro_batches)
        return self._noted(found)

    def _share_of(self, rule: Counting, count: Tensor | int) -> Share:
        """A library's head: a mean over `count` terms, or a sum over samples, whose log is told a sample."""
        if rule.kind == SUM:
            return Share(float(ranks()), 1 / self._window.total)
        assert self.session is not None  # only a run's window has shares
        return Share(self.session.mean(count))

    # -- a loss that the user wrote ------------------------------------------------------------------------------

    def evidence(self) -> Evidence:
        """The rules that every call of the user's loss so far fits; made when first asked for."""
        if self._evidence is None:
            self._evidence = Evidence(tolerance(self.trainer))
        return self._evidence

    def _share_seen(self, loss: Tensor, seen: Seen) -> Share | None:
        """By the rule that every call so far fits; None leaves it the host's way."""
        window, times = self._window, multiplied(self.trainer, self.compute_loss, seen, self.evidence())
        self.evidence().note(loss / times, seen, window.micro_batches, ranks())
        if self._windows == 1 or not self.evidence().calls:
            self._look(Evidence.settle)  # before a rule is settled, the next micro-batch has to know
        counts = {kind: observation.count(kind, seen.batch) for kind in KINDS}
        rule = self.evidence().rule(window.totals)
        if rule is not None and rule.way in (Way.MEAN, Way.SHARE) and not window.as_fetched(rule.kind, counts):
            self.approximate(f"{CHANGED}; {LEFT}")
            rule = None
        if rule is None:
            as_it_is = self._says_scaled or self.evidence().uses_count(seen)
            return None if as_it_is else Share(1 / (window.micro_batches * times))
        weight = self._weight(rule, counts)
        if window.given and window.given[-1][0] != rule:
            self._put_right(rule)
        window.given.append((rule, counts))
        return Share(weight if rule.way is Way.COUNTED else weight / times)

    @cached_property
    def _says_scaled(self) -> bool:
        return says_scaled(self.trainer, self.compute_loss)

    def _weight(self, rule: Rule, counts: dict[str, int | None]) -> float:
        window = self._window
        if rule.way is Way.COUNTED:  # exact, but for a host that counts labels which the loss does not (GPT-2)
            told = rule.kind in window.totals and not own_count(self.trainer)
            return window.number / window.totals[rule.kind] if told else 1.0
        if rule.way is Way.SUM:
            return float(ranks())
        divided = (counts[rule.kind] or 0) * (window.micro_batches if rule.way is Way.SHARE else 1)
        return divided * ranks() / window.totals[rule.kind]

    def _put_right(self, rule: Rule) -> None:
        """The rule that fitted the window's first micro-batches was another's: weigh their gradients again.

        They are one sum by now, so that this can be done only where all of them change alike.
        """
        given = self._window.given
        changes = [self._weight(rule, counts) / (self._weight(old, counts) or 1.0) for old, counts in given]
        found = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        engine = is_deepspeed(self.trainer)  # which has put them elsewhere
        held = changes[0] != 1.0 and (engine or (not found and is_sharded(self.trainer)))  # FSDP: to the window's last
        if held or max(changes) - min(changes) > 1e-6 * max(changes):
            self.approximate("the first window: its first micro-batches were weighed by another rule than its last")
            return
        if found and changes[0] != 1.0:
            torch._foreach_mul_(found, changes[0])
        self._window.given = [(rule, counts) for _, counts in given]

    def _look(self, at: Callable[[Evidence], None]) -> None:
        """Look at the evidence; where nothing fits any more, say so once."""
        evidence = self.evidence()
        before = bool(evidence.possible)
        at(evidence)
        if before and not evidence.possible:
            model = type(counting.base(self.trainer.model)).__name__
            what = "compute_loss" if of_the_user(self.trainer, self.compute_loss) else f"the loss of {model}"
            first = self._windows == 1 or (self._windows == 2 and not self._window.at)
            reason = (
                f"{what} hides how many terms its mean has"
                if first
                else "the loss adds up in another way than on the first batch"
            )
            self.approximate(f"{reason}; {LEFT}")

    # -- the window's end --------------------------------------------------------------------------------------

    def end_window(self) -> None:
        """After the last backward."""
        if self._windows == 1:  # a rule is looked for, and the device waited for, in the first anyway
            self.lost.tell()
        if self.observes:
            self._look(Evidence.settle)

    def _noted(self, found: Any) -> Any:
        self._window.losses.append((self._window.at, loss_of(found).detach()))
        if self.session is not None:
            self.session.loss(loss_of(found), 1 if self._count is None else at_least_one(self._count))
        return found

    def not_finite(self) -> list[int]:
        """Micro-batches of this window, counted from 1, whose loss was NaN or infinite."""
        return sorted({number for number, loss in self._window.losses if not bool(torch.isfinite(loss).all())})
