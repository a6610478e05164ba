"""What a trial looks at beside its updates, each by a name in `TrialRequest.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from plugins.core.session import Session
from plugins.core.step.update import Outcome
from plugins.errors import AccelError
from plugins.trial_run import savings

Write = Callable[..., None]


class Probe:
    """Looks at one thing of a session; `write` appends a line to the record."""

    def __init__(self, session: Session, write: Write) -> None:
        self.session, self.write = session, write

    def begin(self) -> None:
        """The session is built."""

    def arrived(self, first: bool) -> None:
        """A micro-batch came; `first` of its window."""

    def loss(self, value: Tensor) -> None:
        """Its loss, before its backward."""

    def closed(self, outcome: Outcome) -> dict[str, Any]:
        """An update is over; what is to stand in its line of the record."""
        return {}

    def end(self) -> None:
        """The trial is over."""


class Sketch(Probe):
    """A few numbers for each gradient, and for the weights at the end, of which two runs' difference can be told.

    A gradient g is summed with 16 draws of random signs, the same in every process: for two of them, the mean square of
    the differences estimates |g1 - g2|^2 (Johnson and Lindenstrauss). It is taken at the optimizer's step, as a
    direction; `norm` in the same line is that before clipping.
    """

    COUNT = 16

    @override
    def begin(self) -> None:
        self._seen: list[float] | None = None
        self._hook = self.session.optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        found = [None if p.grad is None else p.grad for p in self.session.parameters()]
        self._seen = sketch(found, self.COUNT)

    @override
    def closed(self, outcome: Outcome) -> dict[str, Any]:
        seen, self._seen = self._seen, None
        return {"gradient": seen}

    @override
    def end(self) -> None:
        self._hook.remove()
        self.write(weights=sketch([p.detach() for p in self.session.parameters()], self.COUNT))


@torch.no_grad()
def sketch(tensors: Iterable[Tensor | None], count: int) -> list[float]:
    """The L2 norm of the tensors together, then `count` sums with random signs over it; None stands for zeros."""
    draw = torch.Generator().manual_seed(0)
    sums, square = torch.zeros(count, dtype=torch.float64), 0.0
    for tensor in tensors:
        seed = int(torch.randint(2**31, (1,), generator=draw))
        if tensor is None:
            continue
        flat = tensor.detach().cpu().reshape(-1).to(torch.float64)
        square += float(flat.square().sum())
        signs = torch.Generator().manual_seed(seed)
        for at in range(count):
            drawn = torch.randint(0, 2, (flat.numel(),), generator=signs, dtype=torch.int8)
            sums[at] += (flat * (drawn * 2 - 1)).sum()
    norm = square**0.5
    return [norm, *((sums / norm).tolist() if norm else sums.tolist())]


class Quiet(Probe):
    """Dropout off, so that an update is a function of its samples alone."""

    @override
    def begin(self) -> None:
        for module in self.session.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, nn.RNNBase):
                module.dropout = 0.0


class Freeze(Probe):
    """The first half of the parameters is frozen."""

    @override
    def begin(self) -> None:
        savings.freeze_half(self.session.model)


class EightBit(Probe):
    """The optimizer's states have 8 bits."""

    @override
    def begin(self) -> None:
        savings.eight_bit(self.session.optimizer)


class Budget(Probe):
    """Compiled code keeps half of its activations."""

    @override
    def begin(self) -> None:
        savings.limit_activations()


PROBES: dict[str, type[Probe]] = {
    "gradient": Sketch, "no_dropout": Quiet, "freeze": Freeze, "eight_bit": EightBit, "activation_budget": Budget,
}  # fmt: skip


def probes(names: Iterable[str]) -> list[type[Probe]]:
    """The probes of these names.

    Raises:
        AccelError: a name that there is none of.
    """
    for name in names:
        if name not in PROBES:
            raise AccelError(f"checks={name}: no such check; allowed are {', '.join(PROBES)}")
    return [PROBES[name] for name in names]
