"""Measuring how the loss of one of the libraries' heads adds up, on one batch and on a copy of the model.

A head may use the count that the host hands it, ignore it, or weigh its terms in its own way. Two facts can be
measured: whether the means of parts of a batch, weighted by a counting rule, give the whole's mean, and whether
the parts add up when the count is held (then the host's own way is exact).

What a user wrote is never asked here: see `observation`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from integrations.huggingface.loss_rules.counting import IGNORED, SUM, Counting, candidates, samples

Ask = Callable[[dict[str, Any], Any], Tensor]

TOLERANCE = 1e-4
"""Relative; a loss of fp32 sums differs by less, a wrong rule by far more."""

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "timm", "bitsandbytes")
"""Whose code may be run once more: it is the same on every machine, and does nothing but compute."""

HOST = "host"
"""The loss normalises by the count that the host passes: the host's way is exact."""

LATER = "later"
"""The loss of this batch is not finite: another batch has to tell."""


def probe(loss: Ask, batch: Mapping[str, Any], model: Any, tolerance: float = TOLERANCE) -> Counting | str | None:
    """How `loss(inputs, num_items)` adds up: HOST, a counting rule, LATER, or None where nothing fits.

    Runs forwards without gradients, in evaluation mode, and leaves the random state as it was.
    `num_items` is a 0-dim tensor, or None to ask for the batch's own mean.
    """
    size = samples(batch)
    if size < 2:
        return None
    with _quietly(model), torch.no_grad():
        for held in (False, True):
            number = torch.tensor(float(size)) if held else None
            for told in (telling(batch, model), batch):
                first, rest = take_rows(told, 0, 1), take_rows(told, 1, size)
                try:
                    whole, one, other = (float(loss(dict(part), number)) for part in (told, first, rest))
                    if held and _same(one + other, whole, tolerance):
                        doubled = float(loss(dict(told), torch.tensor(2.0 * size)))
                        if not _same(whole, doubled, tolerance):
                            return HOST
                except Exception:
                    continue  # a loss that cannot be asked in this way is not of this kind
                if not math.isfinite(whole):
                    return LATER
                if not held:
                    fitting = [(rule, _error(rule, (first, rest), (one, other), whole)) for rule in candidates(told)]
                    best = min(fitting, key=lambda found: found[1])
                    if best[1] <= tolerance:
                        return best[0]
                break
    return None


def fits(loss: Ask, batch: Mapping[str, Any], model: Any, rule: Counting, tolerance: float = TOLERANCE) -> bool | None:
    """Whether `rule` is how the loss of two telling rows adds up; None where it cannot be asked.

    For a head that is known by its name: two forwards of a row and one of two.
    """
    size = samples(batch)
    if size < 2:
        return None
    told = telling(take_rows(batch, 0, 2), model)
    parts = take_rows(told, 0, 1), take_rows(told, 1, 2)
    with _quietly(model), torch.no_grad():
        try:
            whole, one, other = (float(loss(dict(part), None)) for part in (told, *parts))
        except Exception:
            return None
    if not math.isfinite(whole):
        return None
    error = _error(rule, parts, (one, other), whole)
    return None if math.isnan(error) else error <= tolerance


def _error(rule: Counting, parts: tuple[Any, Any], means: tuple[float, float], whole: float) -> float:
    """Relative distance of the whole's loss from what the rule makes of its parts'; infinite where it cannot count."""
    counts = [rule.count(part) for part in parts]
    if any(count is None for count in counts) or not sum(count or 0 for count in counts):
        return math.inf
    if rule.kind == SUM:
        made = sum(means)
    else:
        made = sum(n * mean for n, mean in zip(counts, means, strict=True) if n) / sum(n or 0 for n in counts)  # type: ignore[operator]
    return abs(made - whole) / max(abs(made), abs(whole), 1e-12)


def invisible_copy(model: Any) -> Any:
    """A copy in evaluation mode of which nothing can be seen from outside, or None where there is none.

    It has the parameters of the model itself, which forwards without gradients only read, buffers of its own, and no
    hooks. A model with code from outside of the libraries, be it one module, has no such copy: what that code
    does (log, count, gather) would be seen.
    """
    modules = list(model.modules())
    hidden = {"forward", "_original_forward", "_compiled_call_impl", "generate", "zero_grad"}
    if not all(_of_a_library(type(module)) for module in modules):
        return None
    # accelerate puts its autocast there and keeps the original; any other forward on an instance is somebody's own
    if any("forward" in vars(module) and "_original_forward" not in vars(module) for module in modules):
        return None
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    bare = [(vars(module), {name: vars(module)[name] for name in hidden & set(vars(module))}) for module in modules]
    try:
        for own, kept in bare:
            for name in kept:
                del own[name]
        copied = copy.deepcopy(model, shared)
    except Exception:
        return None
    finally:
        for own, kept in bare:
            own.update(kept)
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if name.endswith("_hooks") and isinstance(value, dict):
                vars(module)[name] = type(value)()
    return copied.eval()


def _of_a_library(kind: type) -> bool:
    return kind.__module__.split(".")[0] in LIBRARIES


def telling(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The batch with the first row's labels changed, so that rules which count differently differ in their result.

    Of labels along a sequence or a picture, [B, L] or [B, H, W], the first row keeps an eighth, the first label
    included. Where all rows have one class, [B], the first gets another.
    """
    labels, config = batch.get("labels"), getattr(model, "config", None)
    classes = int(getattr(config, "num_labels", 1))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return dict(batch)
    labels = labels.clone()
    if labels.dim() > 1 and labels.shape[1] > 1:
        ignore = int(getattr(config, "semantic_loss_ignore_index", 255)) if labels.dim() == 3 else IGNORED
        labels[0, max(2, labels.shape[1] // 8) :] = ignore
    elif labels.dim() == 1 and len(labels.unique()) == 1 and classes > 1:
        labels[0] = (labels[0] + 1) % classes
    return {**batch, "labels": labels}


def take_rows(batch: Mapping[str, Any], start: int, stop: int, size: int | None = None) -> dict[str, Any]:
    """The rows [start, stop) of every tensor that has the batch's `size` in dim 0."""
    size = samples(batch) if size is None else size
    return {
        name: value[start:stop] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value
        for name, value in batch.items()
    }


def _same(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-12)


@contextmanager
def _quietly(model: Any) -> Any:
    training = model.training
    model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.train(training)
