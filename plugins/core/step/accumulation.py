"""Accumulation: the micro-batches of one update, weighted so that their gradients add up to the big batch's.

A host's loss of one batch is a sum divided by a count of its own batch. Two forms occur:

- mean:       loss = N / n                 (tokens, labels, images: HF heads, CTC, classification)
- batch mean: loss = b * N / max(s, 1)     (Ultralytics detection: b images, target scores that sum to s)

where N is the un-normalised loss. One big batch would divide by the total count, which is known only when the
window closes. So each micro-batch's loss is multiplied by `weight` (which undoes its own count), and the
accumulated gradient by `factor` (which applies the total) at the close:

    big batch = factor * sum_k weight_k * loss_k,   factor = (sum images_k or 1) / max(sum targets_k, floor)

(A mean over no targets at all divides by 1.)

Losses whose parameters are disjoint (the two branches of an end-to-end head) are separate groups, each with its
own count. A power of two near the expected factor moves from the close into the weights: it keeps fp16 gradients
in range and, being a power of two, changes no other bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.core.system.devices import collective_device, has_float64
from plugins.core.system.sharding import shard
from plugins.errors import AccelError

Scalar = Tensor | float
ALL = ""  # the group that holds every parameter, where a host has only one


@dataclass(frozen=True)
class Term:
    """What one micro-batch's loss was divided by. Tensors are 0-dim and stay on their device: no host sync."""

    weight: Scalar
    targets: Scalar
    images: int | None = None
    floor: float = 0.0

    @classmethod
    def mean(cls, count: Scalar) -> Term:
        """A loss that is a mean over `count` targets (tokens, labels, images)."""
        count = _single(count)
        return cls(weight=_at_least(count, 0.0), targets=count)

    @classmethod
    def batch_mean(cls, images: int, targets: Scalar, floor: float = 1.0) -> Term:
        """A loss that is `images * N / max(targets, floor)`: Ultralytics detection."""
        targets = _single(targets)
        return cls(weight=_at_least(targets, floor) / images, targets=targets, images=images, floor=floor)


@dataclass
class _Totals:
    targets: Scalar = 0.0
    images: int = 0
    scaled: bool = False
    floor: float = 0.0

    def add(self, term: Term) -> None:
        self.targets = self.targets + _double(term.targets)
        self.images += term.images or 0
        self.scaled = term.images is not None
        self.floor = term.floor

    def factor(self, windows: float = 1.0) -> Scalar:
        """The factor of these totals, as if there were `windows` times as many."""
        found: Scalar = (self.images * windows if self.scaled else 1.0) / _at_least(self.targets * windows, self.floor)
        return found


@dataclass
class Window:
    """The micro-batches since the last update.

    `size` is K, the micro-batches an update; None where the host decides when a window closes. Attributes
    count what was added: `micro_batches`, `samples`. `divided`: each is weighed in pieces, see `step.rescue`.
    """

    size: int | None = 1
    exact: bool = True
    micro_batches: int = 0
    samples: int = 0
    expected: int = 1
    divided: bool = False
    _totals: dict[str, _Totals] = field(default_factory=dict)
    _power: dict[str, Scalar] = field(default_factory=dict)
    _last: dict[str, Scalar] = field(default_factory=dict)
    _announced: Scalar | None = None
    _trying: bool = False
    _settled: bool = False  # gradients are those of the update: no factor will come

    def __post_init__(self) -> None:
        self.expected = self.size or 1

    @property
    def full(self) -> bool:
        """Whether all `size` micro-batches are in; never where the host decides."""
        return self.size is not None and self.micro_batches >= self.size

    @property
    def empty(self) -> bool:
        """Whether no micro-batch is in."""
        return self.micro_batches == 0

    @property
    def weighted(self) -> bool:
        """A window of one micro-batch on one rank is the big batch: nothing to weigh."""
        return self.exact and (self.expected > 1 or self.divided or _world() > 1)

    def count(self, samples: int) -> None:
        """A micro-batch of `samples` images or sequences enters the window."""
        self.micro_batches += 1
        self.samples += samples

    def announce(self, total: Scalar, ranks: int = 1) -> None:
        """Tell the window's total count over all ranks before its first micro-batch, where the host knows it.

        Weights are then final, `n * ranks / total` (ranks: the reduction over ranks averages), so that losses add
        up to the true mean and gradients need no rescaling at the close. One group only.
        """
        self._announced = _double(total) / ranks

    def weigh(self, terms: Mapping[str, Term]) -> dict[str, Scalar]:
        """Return what to multiply the micro-batch's loss by, a group each."""
        if self._announced is not None and self.weighted:
            return {group: term.weight / self._announced for group, term in terms.items()}
        weights: dict[str, Scalar] = {}
        for group, term in terms.items():
            totals = self._totals.setdefault(group, _Totals())
            totals.add(term)
            if not self.weighted:
                weights[group] = 1.0
                continue
            if group not in self._power:
                # Over all ranks: their gradients are averaged before the close, so they must share one power.
                self._power[group] = _power_of_two(_over_ranks(totals).factor(self.expected))
            weights[group] = term.weight * self._power[group]
        return weights

    def mean(self, count: Scalar, group: str = ALL) -> Scalar:
        """The weight of a loss that is a mean over `count` targets."""
        return 1.0 if self._trying else self.weigh({group: Term.mean(count)})[group]

    def batch_mean(self, images: int, targets: Scalar, group: str = ALL) -> Scalar:
        """The weight of a loss that is `images * N / max(targets, 1)`."""
        return 1.0 if self._trying else self.weigh({group: Term.batch_mean(images, targets)})[group]

    @contextmanager
    def unweighed(self) -> Iterator[None]:
        """Inside, losses are of a trial: no micro-batch of the run."""
        self._trying = True
        try:
            yield
        finally:
            self._trying = False

    def share(self, group: str = ALL) -> Scalar:
        """The weight of a term that has no exact rule and keeps its host's: it only has to outlive the close.

        The close multiplies it by a factor that is not known yet; the last window's stands in for it.
        """
        if self._trying or self._settled or not self.weighted or group not in self._power:
            return 1.0
        last = self._last.get(group)
        if last is None:  # in the first window
            last = self._totals[group].factor(self.expected / max(self.micro_batches, 1))
        return self._power[group] / last

    def factors(self) -> dict[str, Scalar]:
        """Return what to multiply each group's accumulated gradients by, now that the totals are known."""
        self._settled = True
        if not self.weighted:
            return {}
        found: dict[str, Scalar] = {}
        for group, totals in self._totals.items():
            if group in self._power:
                factor = _over_ranks(totals).factor()
                found[group] = factor / self._power[group]
                self._power[group], self._last[group] = _power_of_two(factor), factor
        return found

    def close(self, expected: int | None = None) -> None:
        """Begin the next window, of `expected` micro-batches where the host decides."""
        self.micro_batches = self.samples = 0
        self._totals.clear()
        self._announced, self._settled = None, False
        self.expected = self.size or expected or self.expected

    def again(self) -> None:
        """Its gradients are dropped: the same micro-batches are to be weighed once more."""
        self._totals.clear()
        self._announced = None

    def state_dict(self) -> dict[str, Any]:
        """The counts, and for every group its totals, its power of two and its last factor."""
        return {
            "micro_batches": self.micro_batches,
            "samples": self.samples,
            "expected": self.expected,
            "totals": {g: [t.targets, t.images, t.scaled, t.floor] for g, t in self._totals.items()},
            "power": dict(self._power),
            "last": dict(self._last),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave; the run's own `size` wins over what was expected then."""
        self.micro_batches, self.samples = int(state["micro_batches"]), int(state["samples"])
        self.expected = self.size or int(state["expected"])  # a resumed run may have another size
        self._totals = {g: _Totals(*values) for g, values in state["totals"].items()}
        self._power, self._last = dict(state["power"]), dict(state["last"])


def _at_least(value: Any, floor: float) -> Any:
    """`max(value, floor)`; at floor 0, 1 in place of 0. Tensors stay on their device."""
    if isinstance(value, Tensor):
        return value.clamp(min=floor) if floor else torch.where(value > 0, value, torch.ones_like(value))
    return max(value, floor) if floor else (value if value > 0 else 1.0)


def _single(value: Scalar) -> Scalar:
    """0-dim. Counts in half precision (target scores under autocast) would be rounded, or overflow, in a sum."""
    if not isinstance(value, Tensor):
        return value
    value = value.reshape(())
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _double(value: Scalar) -> Scalar:
    """Whole numbers for the division at the close, where torch would divide them in single precision (MPS has that)."""
    if isinstance(value, Tensor) and not value.is_floating_point() and has_float64(value.device):
        return value.double()
    return value


def scale_(tensors: Iterable[Tensor], factor: Scalar) -> None:
    """Multiply tensors (of sharded ones, the shards here) in place by one number that may live on the device."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in map(shard, tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), members in kinds.items():
        torch._foreach_mul_(members, factor.to(device=device, dtype=dtype) if isinstance(factor, Tensor) else factor)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _over_ranks(totals: _Totals) -> _Totals:
    if _world() == 1:
        return totals
    device = totals.targets.device if isinstance(totals.targets, Tensor) else collective_device()
    both = torch.stack(
        [
            torch.as_tensor(totals.targets, dtype=torch.float64, device=device).reshape(()),
            torch.tensor(totals.images, dtype=torch.float64, device=device),
        ]
    )
    over_ranks(both)
    return _Totals(both[0], int(both[1].item()), totals.scaled, totals.floor)


def over_ranks(tensor: Tensor) -> None:
    """Sum over ranks, in place.

    Raises:
        AccelError: another rank does not answer.
    """
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:  # torch's own text is several lines, with a stack
        why = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise AccelError(
            "another rank has left the run, or has had another number of batches: call flush() on every rank after the "
            f"last batch ({why})"
        ) from None


def _power_of_two(value: Scalar) -> Scalar:
    """The power of two nearest to a positive value (on its device); 1 where the value is not usable."""
    tensor = torch.as_tensor(value).detach()
    exponent = torch.log2(tensor.float()).round().clamp(-24, 24).nan_to_num(0.0)
    power = torch.ldexp(torch.ones_like(exponent), exponent)
    return power if isinstance(value, Tensor) else float(power)
