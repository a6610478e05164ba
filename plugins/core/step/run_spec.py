"""What a run is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plugins.config import AccelConfig
from plugins.core.step.update import Average, Update


@dataclass(frozen=True)
class RunSpec:
    """What a run is made of, once the host has built everything.

    Attributes:
        config: the settings.
        host: the plug's name in the report.
        model: the bare module, on its device.
        optimizer: the host's own.
        device: of the model.
        micro_batch: samples a micro-batch, on this rank.
        size: K, micro-batches an update; None where the host closes windows by its own rule.
        expected: K that the host's rule is expected to give.
        clip_norm: the host's own L2 norm, which the settings override; None leaves gradients untouched.
        scaler: a `torch.amp.GradScaler`, or None.
        average: moved after every update; with `state_dict` and `load_state_dict` where it is to be resumed.
        groups: parameters by loss group, where a host has several normalisers; default all in one.
        schedule: sets the rates of an update; it is given the update's index.
        dims: dimensions of the input that vary, for the compiler.
        takes: which calls of the model to compile, by their positional arguments.
        sync: reduce gradients over ranks here, once an update.
        uncompilable: why this model's forward cannot be compiled, where it cannot.
        say: shows a line to the user (a host's own logger).
        packages: distributions whose versions the report names.
    """

    config: AccelConfig
    host: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    micro_batch: int
    size: int | None
    expected: int = 1
    clip_norm: float | None = None
    scaler: Any = None
    average: Average | None = None
    groups: Mapping[str, Iterable[nn.Parameter]] | None = None
    schedule: Callable[[int], None] = lambda update: None
    dims: Iterable[int] = ()
    takes: Callable[[tuple[Any, ...]], bool] = lambda args: True
    sync: bool = False
    uncompilable: str = ""
    say: Callable[[str], None] = print
    packages: tuple[str, ...] = ()

    @property
    def clips_at(self) -> float | None:
        """L2 norm, by the settings or the host."""
        wanted = self.config.clip_norm
        return self.clip_norm if wanted == "host" else None if wanted == "off" else float(wanted)

    def new_update(self, updates: Callable[[], int], keep_gradients: Callable[[], bool]) -> Update:
        """The optimizer's update of this run.

        Args:
            updates: the index of the next one.
            keep_gradients: whether gradients are zeroed in place now.
        """
        return Update(
            self.optimizer,
            scaler=self.scaler,
            clip_norm=self.clips_at,
            nonfinite=self.config.nonfinite,
            groups=self.groups,
            average=self.average,
            sync=self.sync,
            keep_gradients=keep_gradients,
            schedule=lambda: self.schedule(updates()),
            order=self.model.parameters(),
        )
