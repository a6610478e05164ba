"""Timed steps on the batch at hand: forward and backward only, so that weights and optimizer are never touched."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plugins.core.autotune import cost_model
from plugins.core.plan import Plan, Timing
from plugins.core.system import devices, memory
from plugins.errors import AccelError

MATRIX = ("mm", "conv", "attention", "linear", "matmul", "einsum", "lstm", "gru", "rnn")
UNFUSED_ON_CPU = ("bernoulli", "rand", "clone", "copy", "embedding", "index", "gather", "scatter", "softmax")


class Trial(Protocol):
    """What a host offers at a window's start.

    `host_precision` is that of the host's own autocast, fp32 without one.
    `loss` runs forward and loss on the batch at hand, in the host's autocast; `apply` switches; in `bare` the model
    is without what was put on it, to be handed to another process.
    """

    @property
    def host_precision(self) -> str:
        """Of the host's own autocast: fp32, bf16 or fp16."""

    def loss(self) -> Tensor:
        """Forward and loss of the batch at hand, 0-dim."""

    def apply(self, precision: str, memory_format: str) -> None:
        """Switch precision and memory format."""

    def bare(self) -> AbstractContextManager[None]:
        """Inside, the model can be pickled: nothing of the host or of ours is on it."""


@dataclass(frozen=True)
class WindowStart:
    """A window's start, before its first forward.

    `update` is the index of the window's update, of `size` micro-batches; `left` counts the micro-batches to come,
    this one included; `shape` is the batch's.
    """

    trial: Trial
    update: int
    left: int
    shape: tuple[int, ...]
    size: int = 1


class NotFinite(Exception):
    """The loss of the batch at hand is not finite, under the run's own plan: it compares no plans."""


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Every buffer is the same tensor with the same values afterwards.

    A forward moves more than BatchNorm's statistics: spectral norm's vectors, counters, codebooks.
    """
    kept = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
    values = [(b, b.detach().clone()) for _, buffers in kept for b in buffers.values() if b is not None]
    try:
        yield
    finally:
        for live, buffers in kept:
            live.clear()
            live.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """The modules' plain attributes are as before: a counter, a list of what was seen, a queue, the latest output.

    Numbers, text, tensors, and lists, dicts and sets of anything; an object of another kind is not looked into.
    """
    kept = [(module, _plain_attributes(module)) for module in model.modules()]
    insides = [(value, _inside(value)) for _, found in kept for value in found.values()]
    try:
        yield
    finally:
        for module, found in kept:
            for name in _plain_attributes(module).keys() - found.keys():
                del vars(module)[name]
            vars(module).update(found)
        for value, inside in insides:
            _put_inside(value, inside)


PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, Tensor)
HOLDING = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
"""These types themselves: a subclass may refuse to be changed."""
OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n not in OF_TORCH and (isinstance(v, PLAIN) or type(v) in HOLDING)}


def _inside(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.requires_grad else value.clone()
    return copy(value) if type(value) in HOLDING else None


def _put_inside(value: Any, inside: Any) -> None:
    if inside is None:
        return
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(inside)
        return
    value.clear()
    value.extend(inside) if isinstance(value, (list, deque)) else value.update(inside)


def time_steps(
    trial: Trial,
    plan: Plan,
    device: torch.device,
    clear: Callable[[], None],
    warn: Callable[[str], None],
    repeats: int = cost_model.REPEATS,
    warm: bool = True,
    hopeless: float = math.inf,
    into: Timing | None = None,
) -> Timing | None:
    """Seconds of forward and backward on the batch at hand under `plan`, which is left in force.

    They are added to `into`, where two plans are timed in turn.

    `clear` drops gradients; `warm` makes one step that is not counted. None where the plan fails or memory does not
    suffice, or that first step took longer than `hopeless` seconds.
    """
    timing = into or Timing(plan)
    try:
        trial.apply(plan.precision, plan.memory_format)
        for index in range(repeats + warm):
            # Inside a host's autocast, weights that the step before cast would be found again, in its layout.
            torch.clear_autocast_cache()
            began = time.perf_counter()
            loss = trial.loss()
            loss.sum().backward()
            devices.synchronize(device)
            taken = time.perf_counter() - began
            clear()
            timing.losses.append(float(loss.detach().float().sum()))
            if index or not warm:
                timing.seconds.append(taken)
            else:
                timing.first = taken
                if taken > hopeless:
                    return None
    except AccelError:
        raise
    except Exception as error:  # what fails under the host's own plan comes again in the run's step, as its own error
        short = memory.is_out_of_memory(error)
        warn(f"plan {plan.name}: dropped, {'out of memory' if short else type(error).__name__} in its trial")
        memory.let_go(error)
        clear()
        devices.empty_cache(device)
        return None
    return timing


def time_in_turn(
    trial: Trial,
    plans: Sequence[Plan],
    device: torch.device,
    clear: Callable[[], None],
    warn: Callable[[str], None],
) -> list[Timing]:
    """Timings of plans on the batch at hand, the first of which is in force.

    Those that fail or are hopeless are left out; without the first there are none.

    In rounds, there and back again: what slows the machine for a while, such as loader workers that fill their queue
    as a run begins, slows all of them alike.

    Raises:
        NotFinite: the first plan's loss is not finite.
    """
    first = time_steps(trial, plans[0], device, clear, warn, 1, warm=False)
    if first is None:
        return []
    if not math.isfinite(first.loss):
        raise NotFinite
    found: list[Timing | None] = [first]
    for plan in plans[1:]:
        found.append(time_steps(trial, plan, device, clear, warn, 1, hopeless=cost_model.HOPELESS * first.middle))
    for _ in range(cost_model.REPEATS - 1):
        found.reverse()
        found = [t and time_steps(trial, t.plan, device, clear, warn, 1, warm=False, into=t) for t in found]
    timings = sorted((t for t in found if t is not None), key=lambda t: plans.index(t.plan))
    return timings if timings and timings[0].plan == plans[0] else []


class OperatorTimes(TorchDispatchMode):
    """Seconds of operators that a compiler fuses, and of all, while entered.

    torch's own profiler writes to stderr. On a CPU the seconds are this thread's own, which other processes do not
    disturb; on an accelerator each operator is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self.alone = MATRIX + (UNFUSED_ON_CPU if device.type == "cpu" else ())
        self.fusable = self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = self.clock()
        out = func(*args, **(kwargs or {}))
        devices.synchronize(self.device)
        taken = self.clock() - began
        self.total += taken
        if not any(part in func.overloadpacket.__name__ for part in self.alone):
            self.fusable += taken
        return out


def fusable_share(trial: Trial, device: torch.device, clear: Callable[[], None]) -> float:
    """The share of a step spent in pointwise work, norms and sums: the most that fusing can save.

    On 2 CPU cores: 0.2 to 0.44 of residual blocks, which gained 0.37 by compile; 0.07 of a BERT, which gained nothing.
    """
    with OperatorTimes(device) as times:
        trial.loss().sum().backward()
    clear()
    return times.fusable / times.total if times.total else 0.0
