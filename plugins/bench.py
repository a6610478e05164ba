"""`accel bench`: what each plan gives on this machine, on small models of three kinds that need no data.

The measure is a plain loop; every plan is the same loop with `Accelerated`. All train in turn, in one process, each
its own copy of the model on the same batch: what slows the machine for a while slows all of them. A plan's first
update holds its compile, from an empty cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core.autotune import cost_model
from plugins.core.compile.toolchain import missing_compiler
from plugins.core.plan import Plan, Timing
from plugins.core.session import Session
from plugins.core.system import devices
from plugins.errors import AccelError
from plugins.loop import Accelerated

WARM_UP = 3  # updates of each that are not timed
CHUNK = 5  # updates of one contender at a time
Say = Callable[[str], None]
Steps = Generator[float, None, None]  # each `next` is an update, and says how many seconds it took


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut. [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        y = nn.functional.silu(self.norms[0](self.first(x)))
        return nn.functional.silu(x + self.norms[1](self.second(y)))


class Gated(nn.Module):
    """LayerNorm, Linear and gated pointwise operations, residual. [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        y = self.linear(self.norm(x))
        update, reset = torch.sigmoid(y), nn.functional.hardsigmoid(y)
        for _ in range(2):
            value = nn.functional.silu(reset * x + y)
            x = torch.lerp(x, value.to(x), update.to(x)) + nn.functional.hardswish(value) * reset * (1 - update)
        return x


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 7, stride=4, padding=3), nn.Sequential(*(Residual() for _ in range(4))))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _pointwise() -> nn.Module:
    return nn.Sequential(*(Gated() for _ in range(6)))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # the model, and the shape of its batch
    "convolutions": (_convolutions, (8, 3, 128, 128)),
    "encoder": (_encoder, (16, 64, 256)),
    "pointwise": (_pointwise, (16, 256, 128)),
}


@dataclass
class Contender:
    """One loop and its seconds; `first` of the timing is its first update, compile included."""

    name: str
    timing: Timing
    steps: Steps

    def against(self, plain: Contender) -> float:
        """Its median update in those of the plain loop."""
        return self.timing.middle / plain.timing.middle

    def pays(self, plain: Contender) -> int | None:
        """The update at which its first one is won back; None where it does not win by more than the spread."""
        if not self.timing.beats(plain.timing):
            return None
        cost = max(self.timing.first - plain.timing.first, 0.0)
        return cost_model.break_even(cost, plain.timing.middle, self.timing.middle, 0, 1)


def bench(kind: str, updates: int, compiled: bool, device: torch.device, show: Say, warn: Say) -> list[Contender]:
    """Trains every contender for so many updates after its first; the plain loop comes first in what is returned.

    A plan that fails here is left out, with a warning; `show` is given what goes on.
    """
    build, shape = KINDS[kind]
    if compiled and (why := missing_compiler(device, "inductor")):
        warn(f"accel: no compiled contenders: {why}")
        compiled = False
    torch.manual_seed(0)
    batch, weights = torch.randn(shape, device=device), build().state_dict()
    running: list[Contender] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        for plan in (None, *plans(build(), device, compiled)):
            model = build().to(device)
            model.load_state_dict(weights)
            name = "plain loop" if plan is None else "accel" if plan == Plan() else plan.name
            show(f"{kind}: {name}: first update")
            steps = plain(model, batch) if plan is None else plugged(model, batch, plan, folder)
            contender = Contender(name, Timing(plan or Plan()), stack.enter_context(closing(steps)))
            try:
                contender.timing.first = next(steps)
            except Exception as error:
                if plan is None:
                    raise
                why = str(error) if isinstance(error, AccelError) else type(error).__name__
                warn(f"accel: {name}: left out, {why}")
                continue
            running.append(contender)
        for contender in running:  # the machine settles after all that was built
            for _ in islice(contender.steps, WARM_UP):
                pass
        for done in range(0, updates, CHUNK):
            show(f"{kind}: update {done} of {updates}, in turn")
            for contender in running if done % (2 * CHUNK) == 0 else reversed(running):  # there and back again
                contender.timing.seconds += islice(contender.steps, min(CHUNK, updates - done))
    return running


def plans(model: nn.Module, device: torch.device, compiled: bool) -> list[Plan]:
    """What a run would try here, whether it gains or not.

    Precisions and layouts; and the compile of repeated blocks, on top of the loop's own plan and of the most promising
    one.
    """
    eager = [Plan(), *cost_model.layouts(model, device, Plan(), frozenset({"precision", "memory_format"}))]
    return [*eager, *(replace(plan, compile="regional") for plan in eager[:2] if compiled)]


def plain(model: nn.Module, batch: Tensor) -> Steps:
    """The loop without the plug."""
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        began = time.perf_counter()
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield _since(began, batch.device)


def plugged(model: nn.Module, batch: Tensor, plan: Plan, folder: str) -> Steps:
    """The same loop, at this plan."""
    config = AccelConfig.model_construct(  # neither accel.yaml nor ACCEL_* variables
        plan="off",
        precision="fp32" if plan.precision == "host" else plan.precision,
        memory_format=plan.memory_format,
        compile="off" if plan.compile == "eager" else "on",
        compile_scope="auto" if plan.compile == "eager" else plan.compile,
        cache_dir=Path(folder),
        recompile_budget=64,  # graphs are counted by process
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with Accelerated(model, optimizer, say=lambda line: None, config=config) as accel:
        compilation = cast("Session", accel.session).compilation
        compilation.monitor.progress = None  # `bench` shows what goes on
        while True:
            began = time.perf_counter()
            with accel.forward(batch) as images:
                loss = model(images).float().square().mean()
            accel.backward(loss, weight=len(batch))
            if plan.compile != "eager" and not compilation.active:
                raise AccelError(compilation.decision.outcome.reason)
            yield _since(began, batch.device)


def _since(began: float, device: torch.device) -> float:
    devices.synchronize(device)
    return time.perf_counter() - began
