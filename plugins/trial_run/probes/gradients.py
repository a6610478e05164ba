"""Gradients and weights of a trial, in a few numbers of which two runs' difference can be told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from plugins.core.step.update import Outcome
from plugins.trial_run.probes.base import Probe

COUNT = 16  # random sums: the difference of two gradients is known to about a fifth of itself
FIRST = 8  # updates that are looked at


class Sketch(Probe):
    """A gradient g as its norm and its direction's sums under 16 draws of random signs, the same in every process.

    The mean square of two gradients' differences in these sums estimates |g1 - g2|^2 (Johnson and Lindenstrauss, 1984).
    It is taken at the optimizer's step, after clipping; `norm` in the same line is that before.
    """

    @override
    def begin(self) -> None:
        self._seen: list[float] | None = None
        self._hook = self.session.optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes it here, or at the end of a closure: Lightning's has the backward in it."""
        given = {**dict(zip(("closure",), args[1:], strict=False)), **kwargs}  # args[0] is the optimizer
        if (closure := given.pop("closure", None)) is None:
            return self._take()

        def taken() -> Any:
            value = closure()
            self._take()
            return value

        return (*args[:1], taken), given

    def _take(self) -> None:
        if self.session.updates < FIRST:
            self._seen = sketch(p.grad for p in self.session.parameters())

    @override
    def closed(self, outcome: Outcome) -> dict[str, Any]:
        seen, self._seen = self._seen, None
        return {"gradient": seen} if seen is not None else {}

    @override
    def end(self) -> None:
        self._hook.remove()


@torch.no_grad()
def sketch(tensors: Iterable[Tensor | None], count: int = COUNT) -> list[float]:
    """The L2 norm of the tensors together, then the sums with random signs of their direction; None is zeros."""
    sums, square = torch.zeros(count, dtype=torch.float64), 0.0
    for seed, tensor in enumerate(tensors):
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


class Reached(Probe):
    """Parameters of the model whose gradient was missing, or zero all over, in all of the trial's first updates."""

    @override
    def begin(self) -> None:
        self._names = {p: name for name, p in self.session.model.named_parameters()}
        self._idle = {p for p in self.session.parameters() if p.requires_grad and p in self._names}
        self._trainable = len(self._idle)
        self._missing = {p for p in self._names if p.requires_grad}  # also those that the optimizer does not hold
        self._held = set(self.session.parameters())
        self._hook = self.session.optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self.session.updates < FIRST:
            self._missing = {p for p in self._missing if p.grad is None}
            self._idle = {p for p in self._idle if p.grad is not None and not bool(p.grad.any())}

    @override
    def end(self) -> None:
        self._hook.remove()
        names = self._names
        self.write(
            trainable=self._trainable,
            without_gradient=[names[p] for p in names if p in self._missing],
            zero_gradient=[names[p] for p in names if p in self._idle],
            not_held=[n for p, n in names.items() if p.requires_grad and p not in self._held],
        )


class Division(Probe):
    """Whether the loss that comes to its backward has just been divided by the micro-batches of an update."""

    @override
    def loss(self, value: Tensor) -> None:
        many = self.session.window.expected
        node, self._seen = value.grad_fn, getattr(self, "_seen", False)
        other = getattr(node, "_saved_other", None)
        if many > 1 and not self._seen and isinstance(other, Tensor) and other.numel() == 1 and node is not None:
            factor = float(other) if node.name().startswith("Mul") else 1 / float(other)
            if abs(factor * many - 1) < 1e-6:
                self._seen = True
                self.write(divided_by=many)


class Samples(Probe):
    """Sums over an update's inputs, so that two runs can be told to have had the same samples."""

    @override
    def begin(self) -> None:
        self._sums = [0.0, 0.0]
        self._hook = self.session.model.register_forward_pre_hook(self._before, with_kwargs=True)

    @torch.no_grad()
    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        values = [*args, *kwargs.values()]
        values = [*values[0].values(), *values[1:]] if values and isinstance(values[0], dict) else values
        found = next((v for v in values if isinstance(v, Tensor) and v.dim() > 1), None)
        if found is None:
            return
        value, mask = found.detach().cpu().double(), kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == value.shape:
            value = value * mask.cpu().double()
        if value.numel():
            self._sums[0] += float(value.sum())
            self._sums[1] += float(value.square().sum())

    @override
    def closed(self, outcome: Outcome) -> dict[str, Any]:
        sums, self._sums = self._sums, [0.0, 0.0]
        return {"inputs": sums}

    @override
    def end(self) -> None:
        self._hook.remove()
