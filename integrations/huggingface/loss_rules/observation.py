"""Seeing how a user's loss adds up, in the calls that the host makes anyway: no call more than the host's own.

While `compute_loss` runs, the model's outputs are noted, and the count that the host passes is followed. What the
loss came to is then compared with what the usual losses make of these outputs: a sum over tokens, samples or
values, divided by a count of the batch, by the host's count of the window, or by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from integrations.huggingface.loss_rules.counting import IGNORED, Counting
from integrations.huggingface.loss_rules.followed_count import Followed, Trace, bare, plain

CHUNK = 1 << 24
"""Elements of logits that are looked at together: a vocabulary's logits are not copied as a whole."""


class Way(Enum):
    """What a loss divides its sum by."""

    MEAN = "its own terms"
    SHARE = "its own terms times the micro-batches of the window"
    COUNTED = "the host's count of the window"
    SUM = "nothing"


@dataclass(frozen=True)
class Rule:
    """A loss of `form`, whose terms `kind` counts, divided in one `way`."""

    form: str
    kind: str
    way: Way


def _cross(logits: Tensor, labels: Tensor, ignore: int = IGNORED) -> Tensor:
    """Cross entropy of every term: logits [..., C] and labels [...] give [...], 0 at `ignore`."""
    rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    step = max(1, CHUNK // rows.shape[1])
    parts = [
        functional.cross_entropy(rows[a : a + step].float(), flat[a : a + step], ignore_index=ignore, reduction="none")
        for a in range(0, len(rows), step)
    ]
    return torch.cat(parts).view(labels.shape)


def _tokens(seen: Seen) -> Tensor:
    return _cross(seen.logits, seen.labels).sum()


def _shifted(seen: Seen) -> Tensor:
    if "shift_labels" in seen.batch:
        return _cross(seen.logits, seen.batch["shift_labels"]).sum()
    return _cross(seen.logits[:, :-1], seen.labels[:, 1:]).sum()


def _sequences(seen: Seen) -> Tensor:
    """Each sequence's own mean, added up."""
    if seen.labels.dim() < 2:
        raise ValueError
    return (_cross(seen.logits, seen.labels).sum(1) / (seen.labels != IGNORED).sum(1).clamp(min=1)).sum()


def _shifted_sequences(seen: Seen) -> Tensor:
    labels = seen.labels[:, 1:]
    return (_cross(seen.logits[:, :-1], labels).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)).sum()


def _pixels(seen: Seen) -> Tensor:
    logits = seen.logits.float()
    if logits.shape[-2:] != seen.labels.shape[-2:]:
        logits = functional.interpolate(logits, size=seen.labels.shape[-2:], mode="bilinear", align_corners=False)
    return _cross(logits.movedim(1, -1), seen.labels, 255).sum()


def _answers(seen: Seen) -> Tensor:
    start, end = seen.output("start_logits"), seen.output("end_logits")
    length = start.shape[1]
    found = [
        _cross(logits, seen.batch[name].view(-1).clamp(0, length), length).sum()
        for logits, name in ((start, "start_positions"), (end, "end_positions"))
    ]
    return (found[0] + found[1]) / 2


def _values(loss: Callable[..., Tensor]) -> Callable[[Seen], Tensor]:
    """A loss of every value; labels as numbers, of as many elements as the logits."""

    def added(seen: Seen) -> Tensor:
        if seen.labels.numel() != seen.logits.numel():
            raise ValueError
        return loss(seen.logits.float().flatten(), seen.labels.float().flatten(), reduction="sum")

    return added


FORMS: dict[str, tuple[Callable[[Any], Tensor], tuple[str, ...]]] = {
    "tokens": (_tokens, ("tokens", "samples", "values")),
    "shifted tokens": (_shifted, ("shifted tokens", "samples")),
    "sequences": (_sequences, ("samples",)),
    "shifted sequences": (_shifted_sequences, ("samples",)),
    "pixels": (_pixels, ("pixels",)),
    "answers": (_answers, ("positions", "samples")),
    "binary": (_values(functional.binary_cross_entropy_with_logits), ("values", "samples")),
    "squares": (_values(functional.mse_loss), ("values", "samples")),
    "distances": (_values(functional.l1_loss), ("values", "samples")),
    "huber": (_values(functional.smooth_l1_loss), ("values", "samples")),
}
"""What a loss may add up, and how its terms may be counted."""

OF_THE_HOST = "a quotient by the host's count"
RULES: tuple[Rule, ...] = (
    *(Rule(form, kind, Way.MEAN) for form in FORMS for kind in FORMS[form][1]),
    *(Rule(form, FORMS[form][1][0], Way.COUNTED) for form in FORMS),
    *(Rule(form, kind, Way.SHARE) for form in FORMS for kind in FORMS[form][1]),
    *(Rule(form, "samples", Way.SUM) for form in FORMS),
    Rule(OF_THE_HOST, "the host's", Way.COUNTED),
)
"""All that can be told, the likeliest first; the same list on every rank."""

KINDS = tuple(dict.fromkeys(kind for _, kinds in FORMS.values() for kind in kinds))


def count(kind: str, batch: Mapping[str, Any]) -> int | None:
    """Terms of one batch; None where it has none of this kind."""
    labels = batch.get("labels")
    try:
        if kind == "shifted tokens" and (not isinstance(labels, Tensor) or labels.dim() < 2):
            return None
        return Counting(kind, ignore=255 if kind == "pixels" else IGNORED).count(batch)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


@dataclass
class Seen:
    """One call of a user's loss: what went in, what the model gave, and what became of the host's count.

    Attributes:
        batch: the inputs as they came, labels included.
        number: the host's count, or None where it passes none.
        passed: calls of the model with labels that got the count, each with the inputs that it got.
        own: of such a call, the loss that the model gave; the host multiplies it in place.
    """

    batch: Mapping[str, Any]
    number: Any = None
    trace: Trace = field(default_factory=Trace)
    outputs: list[Any] = field(default_factory=list)
    passed: list[Seen] = field(default_factory=list)
    own: Tensor | None = None
    _totals: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        """Of the batch at hand."""
        return self.batch["labels"]  # type: ignore[no-any-return]

    @property
    def logits(self) -> Tensor:
        """Of the model on this batch, detached."""
        return self.output("logits")

    def output(self, name: str) -> Tensor:
        """One output of the model, detached; the only floating tensor of a model that returns no dictionary."""
        (outputs,) = self.outputs  # a loss of several forwards is of no kind that is known here
        if isinstance(outputs, Mapping):
            return outputs[name].detach()  # type: ignore[no-any-return]
        found = outputs if isinstance(outputs, Tensor) else next(o for o in outputs if o.dim())
        return found.detach()

    def rows(self, stop: int, take: Callable[..., dict[str, Any]]) -> Seen:
        """The same call, of its first rows only."""
        outputs = [take(o, 0, stop, self.size) if isinstance(o, Mapping) else o[:stop] for o in self.outputs]
        return Seen(take(self.batch, 0, stop, self.size), self.number, self.trace, outputs)

    @property
    def loss(self) -> Tensor | None:
        """Among the outputs of the one call of the model, as it is now; None where there is none."""
        outputs = self.outputs[0] if len(self.outputs) == 1 else {}
        found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        return found.detach() if isinstance(found, Tensor) and not found.dim() else None

    @property
    def size(self) -> int:
        """Samples of the batch; 0 where that cannot be told."""
        return count("samples", self.batch) or 0

    def total(self, form: str) -> Tensor | None:
        """What the loss would add up to in this form; None where it does not apply."""
        if form not in self._totals:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                try:
                    self._totals[form] = FORMS[form][0](self)
                except Exception:
                    self._totals[form] = None  # shapes or names that this form does not know
        return self._totals[form]

    @property
    def device(self) -> torch.device:
        """Of the batch; the CPU where it holds no tensor."""
        return next((v.device for v in self.batch.values() if isinstance(v, Tensor)), torch.device("cpu"))


@contextmanager
def watching(model: Any, batch: Any, number: Any) -> Iterator[Seen]:
    """Inside, what `model(...)` returns is noted. The model itself runs as it would, compiled or not."""
    seen = Seen(dict(batch) if isinstance(batch, Mapping) else {}, number)
    own = vars(model)
    before = own.get("_compiled_call_impl")

    def called(*args: Any, **kwargs: Any) -> Any:
        counted = any(isinstance(value, Followed) for value in kwargs.values())
        given = plain(kwargs) if counted else kwargs
        outputs = (before or model._call_impl)(*args, **given)
        seen.outputs.append(outputs)
        if counted and "labels" in kwargs:  # without them the model makes no loss of the count
            call = Seen(given, number, Trace(used=True), [outputs])
            call.own = None if call.loss is None else call.loss.clone()
            seen.passed.append(call)
        return outputs

    own["_compiled_call_impl"] = called
    try:
        yield seen
    finally:
        if own.get("_compiled_call_impl") is called:
            del own["_compiled_call_impl"]
            if before is not None:
                own["_compiled_call_impl"] = before


def errors(loss: Tensor, seen: Seen, rules: list[Rule], micro_batches: int, ranks: int) -> dict[Rule, Tensor]:
    """Relative distance of `loss` from what each rule makes of the call; rules that do not apply are left out.

    Args:
        loss: of the micro-batch, 0-dim.
        seen: its call.
        rules: those that are still possible.
        micro_batches: K, of the window.
        ranks: by which the host multiplies a loss that is divided by its count.
    """
    loss = loss.detach().double()
    found: dict[Rule, Tensor] = {}
    counts: dict[str, int | None] = {}
    number = bare(seen.number)
    for rule in rules:
        if rule.form == OF_THE_HOST:
            quotients = [q.double() * by for q in seen.trace.quotients for by in {1, ranks}]
            if quotients:
                found[rule] = torch.stack([_apart(loss, q.to(loss.device)) for q in quotients]).min()
            continue
        if rule.way is Way.COUNTED and (number is None or not (seen.trace.used or seen.passed)):
            continue
        if rule.kind not in counts:
            counts[rule.kind] = count(rule.kind, seen.batch)
        total, terms = seen.total(rule.form), counts[rule.kind]
        if total is None or terms is None:
            continue
        total = total.double()
        if rule.way is Way.MEAN:
            found[rule] = _apart(loss, total / terms)
        elif rule.way is Way.SHARE:
            found[rule] = _apart(loss * micro_batches, total / terms)
        elif rule.way is Way.SUM:
            found[rule] = _apart(loss, total)
        else:
            found[rule] = torch.minimum(_apart(loss, total / number), _apart(loss, total * ranks / number))
    return found


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Relative; 0 for two means over no term at all, infinite where only one is not a number."""
    both = a.isnan() & b.isnan()
    apart = (a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1e-12)
    return torch.where(both, torch.zeros_like(apart), apart.nan_to_num(nan=math.inf))
