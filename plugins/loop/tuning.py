"""What a hand-written loop lets be measured, and when: the settings, by rule or by trials on its own micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from integrations.contract import Session
from integrations.shared.learning_rate import rate_factor
from plugins.config import AccelConfig
from plugins.core.autotune.plan_file import Start
from plugins.core.step import precision
from plugins.core.system.sharding import holds_shards
from plugins.errors import AccelError
from plugins.loop import nested
from plugins.loop.replay import Replay

ENDLESS = 100_000  # micro-batches that a loop without an end is taken to have left: a hanging compile must end too


class Layout(Protocol):
    """Precision and memory layout, as `integrations.precision_layout.LoopLayout` holds them."""

    device: torch.device

    def apply(self, precision: str, memory_format: str) -> None:
        """Switch precision and memory format."""

    def at(self, batch: Any) -> Any:
        """A batch in the layout in force."""


class LoopTuning:
    """The trials of one run.

    Args:
        config: the settings, before any rule.
        session: the run, its parts built.
        layout: what trials switch.
        replay: the model's calls in the micro-batch before.
        measured: whether what is `auto` was left open from the start.
    """

    def __init__(self, config: AccelConfig, session: Session, layout: Layout, replay: Replay, measured: bool) -> None:
        self.config, self.session, self.layout, self.replay, self.measured = config, session, layout, replay, measured
        self.opened = False  # by `batches`, after the run was built by rule
        self._left, self._total = 0, math.inf

    def measure(self) -> None:
        """From here on what is `auto` is measured, if nothing was trained yet."""
        if self.measured or self.session.report.window.micro_batches or not may_measure(self.config):
            return
        self.measured = self.opened = True
        if not isinstance(self.config.plan, Path):
            start = Start.of(self.config, self.layout.device)
            self.layout.apply(start.plan.precision, start.plan.memory_format)
            self.session.open_plan(start)

    def left(self, loader: Iterable[Any], epochs_left: int, done: int) -> None:
        """`done` micro-batches of the loader's are behind us: its length is asked for once, by who measures."""
        if not done:
            self._total = _length(loader) * epochs_left if self.measured and self.session.waits else math.inf
        self._left = int(max(min(self._total - done, ENDLESS), 0))

    def before(self, batch: Any) -> None:
        """At a micro-batch, before its forward: try plans on the model's calls of the one before."""
        if not self.measured:
            return
        first = next(nested.tensors(batch), None)
        if first is not None and self.session.window.empty and self.session.waits:
            self.session.plan_window(self.layout.at(self.replay.loss), self._left, first.shape)
        if self.session.measured:
            self.replay.forget()

    def noting(self) -> AbstractContextManager[None]:
        """Inside, the model's calls are noted, as long as there is a use for them."""
        return self.replay.noting() if self._notes else nullcontext()

    @property
    def _notes(self) -> bool:
        return self.measured and self.session.timing

    def after(self) -> None:
        """After a forward: without a call of the model there is nothing to try."""
        if self._notes and not self.replay.calls:
            self.session.measure_nothing("the loss function does not call the model itself")

    def tune(self, loss: Callable[[], Tensor], left: float, shape: Iterable[int]) -> None:
        """See `Accelerated.tune`."""
        if not isinstance(left, Real) or math.isnan(left):
            raise AccelError(f"plan: left={left!r}: expected the micro-batches still to come, or math.inf")
        if self.session.window.empty and self.session.waits:
            trial = self.layout.at(partial(_checked, loss))
            self.session.plan_window(trial, int(max(min(left, ENDLESS), 0)), shape)

    def resume(self) -> None:
        """The plan of the run that is resumed, at once: the window may be half done."""
        if self.measured:
            self.session.plan_window(self.layout, 0, ())  # type: ignore[arg-type]


def settings(config: AccelConfig | str | Path | None, options: dict[str, Any], wrapped: bool) -> AccelConfig:
    """Options laid over the configuration; a model that its owner wrapped is not compiled, nor plans tried on it.

    Raises:
        AccelError: a bad option, or `compile=on` for a wrapped model.
    """
    if isinstance(config, AccelConfig):
        chosen = AccelConfig(**{**config.given(), **options}) if options else config
    else:
        chosen = AccelConfig(config, **options)
    if not wrapped:
        return chosen
    if chosen.compile == "on":
        raise AccelError("compile=on: the model is wrapped already (torch.compile or DataParallel); give the bare one")
    return chosen.model_copy(update={"compile": "off", "plan": "off"})


def may_measure(config: AccelConfig) -> bool:
    """Whether a loop that tunes has a use for the tuner.

    Ranks would have to agree on what they measure, and at `compile=on` every candidate would be compiled anew.
    """
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return isinstance(config.plan, Path) or (config.plan == "auto" and config.compile != "on" and alone)


def scale_rate(config: AccelConfig, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
    """The learning rate for `accumulate` times as many samples an update, as `lr_scale` says."""
    factor = rate_factor(config.lr_scale, accumulate)
    if factor != 1.0:
        for group in optimizer.param_groups:
            group["lr"] *= factor


def by_rule(config: AccelConfig, model: nn.Module, device: torch.device) -> AccelConfig:
    """The settings with precision and layout resolved for this device.

    A layout that was not asked for is taken with a half precision only: alone it was seen to lose up to a quarter.

    Raises:
        AccelError: a precision that the device cannot train in.
    """
    dtype = precision.resolve(config.precision, device)
    convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    may = convolutions and (config.memory_format == "channels_last" or not holds_shards(model))
    wanted = {"auto": dtype in precision.HALF, "channels_last": True, "host": False}[config.memory_format]
    layout = "channels_last" if wanted and may else "host"
    return config.model_copy(update={"precision": dtype, "memory_format": layout})


def _length(loader: Iterable[Any]) -> float:
    """Of a loader that says it; a data set's own `__len__` may refuse in a way of its own."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:
        return math.inf


def _checked(loss: Callable[[], Tensor]) -> Tensor:
    value = loss()
    if not isinstance(value, Tensor):
        raise AccelError(f"plan: the loss function returned {type(value).__name__}; it has to return the loss")
    return value
