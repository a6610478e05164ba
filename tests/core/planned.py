"""A host's loop with a clock of its own: every plan takes the seconds that a test gives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core import session
from plugins.core.autotune import timing
from plugins.core.autotune.plan_file import Start
from plugins.core.plan import Plan
from plugins.core.session import RunSpec, Session
from plugins.core.telemetry import step_metrics
from tests.core.tiny import CPU

Costs = Callable[[Plan], float]
CACHES = count()
OF = 1000  # updates that a run is said to have
UPDATES = 10  # that it makes
BOTH_PLAN = Plan("bf16", "channels_last")
BOTH_WIN = {"host": 1.0, "bf16": 0.8, "channels_last": 0.7, "both": 0.5}


class Clock:
    """Stands still unless it is advanced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        fake = SimpleNamespace(perf_counter=lambda: self.now, thread_time=time.thread_time)
        for module in (step_metrics, session, timing):
            monkeypatch.setattr(module, "time", fake)


class Net(nn.Module):
    """Everything that a trial could leave a trace in: a convolution, BatchNorm, dropout. [B, 3, 8, 8] -> [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.drop(self.body(x).mean((2, 3))))
        return found


class Blocks(nn.Module):
    """Repeated blocks without convolutions, which a CPU may compile. [B, 6] -> [B, 6]."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.SiLU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Host:
    """A loop that answers trials: `loss` takes `costs(plan)` seconds, and may be made wrong or fail."""

    def __init__(self, clock: Clock, costs: Costs, model: type[nn.Module] = Net, shape: tuple[int, ...] = (4, 3, 8, 8)):
        torch.manual_seed(0)
        self.clock, self.costs, self.shape = clock, costs, shape
        self.model: Any = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.plan = Plan()
        self.wrong: Callable[[Plan], float] = lambda plan: 0.0  # added to the loss
        self.fails: Callable[[Plan], Exception | None] = lambda plan: None
        self.overwrites: Callable[[Plan], bool] = lambda plan: False  # gradients that are there are lost
        self.losses = 0
        self.said: list[str] = []
        self.cache = f"cache-{next(CACHES)}"  # each its own, unless a test shares one
        self.x = torch.empty(0)

    # -- what a trial asks for

    host_precision = "fp32"

    def loss(self) -> Tensor:
        self.losses += 1
        plan = self._compiled(self.plan)
        self.clock.now += self.costs(plan)
        if error := self.fails(plan):
            raise error
        if self.overwrites(plan):
            self.model.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.bfloat16) if plan.precision == "bf16" else nullcontext():
            value: Tensor = self.model(self.x).float().square().mean() + self.wrong(plan)
            return value

    def apply(self, precision: str, memory_format: str) -> None:
        self.plan = Plan(precision, memory_format)
        last = memory_format == "channels_last"
        self.model.to(memory_format=torch.channels_last if last else torch.contiguous_format)

    @contextmanager
    def bare(self) -> Iterator[None]:
        yield

    def _compiled(self, plan: Plan) -> Plan:
        if any(getattr(m._compiled_call_impl, "active", False) for m in self.model.modules()):
            return Plan(plan.precision, plan.memory_format, "regional", self.open.compilation.cuda_graphs)
        return plan

    # -- the loop

    def session(self, size: int = 1, **options: Any) -> Session:
        torch.manual_seed(1)
        config = AccelConfig(**{"precision": "auto", "compile": "off", "cache_dir": self.cache, **options})
        start = Start.of(config, CPU)
        self.apply(start.precision, start.memory_format)
        self.open = Session(
            RunSpec(config, "test", self.model, self.optimizer, CPU, micro_batch=4, size=size, say=self.said.append)
        )
        return self.open

    def run(
        self,
        updates: int,
        folder: Path | None = None,
        first: int = 0,
        each: Callable[[int], None] = lambda update: None,
        end: bool = True,
        of: int = OF,
        **options: Any,
    ) -> Session:
        """The updates from `first` up to `updates` of a run of `of`, one micro-batch each, in the session that is open.

        `each(update)` is called before a window.
        """
        held = self.session(**options) if first == 0 else self.open
        for update in range(first, updates):
            each(update)
            draw = torch.Generator().manual_seed(update)
            self.x = torch.rand(self.shape, generator=draw)
            held.micro_batch(len(self.x))
            held.plan_window(self, of - update, self.x.shape)
            (self.loss() * held.mean(len(self.x))).backward()
            held.backward_done()
            held.idle()
        if end:
            held.end(folder)
        return held


def by_name(**seconds: float) -> Costs:
    """Seconds by plan: `host`, `bf16`, `channels_last`, `both`, `compiled`, `graphs`."""

    def cost(plan: Plan) -> float:
        if plan.compile != "eager":
            return seconds.get("graphs" if plan.cuda_graphs else "compiled", 1.0)
        names = [n for n in (plan.precision, plan.memory_format) if n not in ("host", "fp32")]
        return seconds.get("both" if len(names) == 2 else names[0] if names else "host", 1.0)

    return cost


def names(host: Host) -> list[str]:
    return [timing.plan.name for timing in host.open.tuner.timings]
