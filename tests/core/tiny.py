"""The smallest models, batches and losses that show the algebra: shared by the core's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core.compile.decision import CompileOutcome, CompileResult
from plugins.core.session import RunSpec, Session

CPU = torch.device("cpu")


def fault(reason: str) -> CompileOutcome:
    """An error of the compiler that comes again."""
    return CompileOutcome(CompileResult.FAILED, reason, retryable=False)


@dataclass
class Batch:
    """Inputs x [B, 3], targets y [B, 2], target scores s [B]: 0 where an image has no object."""

    x: Tensor
    y: Tensor
    s: Tensor


class Net(nn.Module):
    """Two heads: the second sees detached features, as the one-to-one branch of an end-to-end head does."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.a = nn.Linear(5, 2)
        self.b = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.norm(self.trunk(x)))
        return self.a(features), self.b(features.detach())

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"many": [*self.trunk.parameters(), *self.a.parameters()], "one": [*self.b.parameters()]}


class Mlp(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32, norm: bool = False) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(norm).to(dtype)


def batches(
    seed: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32, empty: Iterable[int] = ()
) -> list[Batch]:
    """Micro-batches of these sizes; those in `empty` have no target at all."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for index, size in enumerate(sizes):
        x = torch.randn(size, 3, generator=draw, dtype=torch.float64)
        y = torch.randn(size, 2, generator=draw, dtype=torch.float64)
        s = torch.rand(size, generator=draw, dtype=torch.float64) * 3 * (torch.rand(size, generator=draw) < 0.7)
        made.append(Batch(x.to(dtype), y.to(dtype), (s * (index not in set(empty))).to(dtype)))
    return made


def joined(parts: Sequence[Batch]) -> Batch:
    """The one big batch."""
    return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "s")))


def count(batch: Batch) -> Tensor:
    """Targets of a mean: images that have any."""
    return (batch.s > 0).sum()


def mean_of(out: Tensor, batch: Batch) -> Tensor:
    """N / n, and 0 where there is no target."""
    kept = (batch.s > 0).to(out)
    return ((out - batch.y).square().sum(1) * kept).sum() / kept.sum().clamp(min=1)


def batch_mean_of(out: Tensor, batch: Batch) -> Tensor:
    """b * N / max(s, 1), as Ultralytics normalises detection; every image adds to N, those without objects too."""
    each = (out - batch.y).square().sum(1) * (batch.s + 0.1)
    return len(batch.x) * each.sum() / batch.s.sum().clamp(min=1)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return mean_of(model(batch.x), batch)


def batch_mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return batch_mean_of(model(batch.x), batch)


Form = tuple[Callable[[nn.Module, Batch], Tensor], Callable[[Session, Batch], Any]]
FORMS: dict[str, Form] = {
    "mean": (mean_loss, lambda session, batch: session.mean(count(batch))),
    "batch_mean": (batch_mean_loss, lambda session, batch: session.batch_mean(len(batch.x), batch.s.sum())),
}


def session_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: int | None = 1,
    options: dict[str, Any] | None = None,
    said: list[str] | None = None,
    **ready: Any,
) -> Session:
    """A session that is ready to train `model`; what it tells the user is appended to `said`."""
    lines = said if said is not None else []
    config = AccelConfig(**{"compile": "off", **(options or {})})
    spec = {"device": CPU, "micro_batch": 8, "size": size, "say": lines.append, **ready}
    return Session(RunSpec(config, "test", model, optimizer, **spec))


def feed(session: Session, model: nn.Module, batch: Batch, form: str = "mean") -> Any:
    """One micro-batch through the hooks of a session; returns the outcome where it closed a window."""
    loss, weight = FORMS[form]
    session.micro_batch(len(batch.x))
    value = loss(model, batch) * weight(session, batch)
    scaler = session.update.scaler
    (value if scaler is None else scaler.scale(value)).backward()
    return session.backward_done()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same(ours: Any, theirs: Any) -> bool:
    """Bitwise equality of nested dicts, lists and tensors."""
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)
