"""What a plug hands to its adapter from the core. See `integrations.contract`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from integrations.contract.parts import Average, Config, Files, Start, WeightAverage
from integrations.contract.session import Session


class NewSession(Protocol):
    """Builds the session of one run; its arguments are the fields of `plugins.core.session.RunSpec`."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        micro_batch: int,
        size: int | None,
        expected: int = 1,
        clip_norm: float | None = None,
        scaler: Any = None,
        average: Average | None = None,
        groups: Mapping[str, Iterable[nn.Parameter]] | None = None,
        schedule: Callable[[int], None] = ...,
        dims: Iterable[int] = (),
        takes: Callable[[tuple[Any, ...]], bool] = ...,
        sync: bool = False,
        uncompilable: str = "",
    ) -> Session:
        """Everything is built: model on its device, optimizer, average.

        Args:
            model: the bare module.
            optimizer: the bare torch optimizer.
            device: of the model.
            micro_batch: samples a micro-batch, on this rank.
            size: K, micro-batches an update; None where the host closes windows by its own rule.
            expected: K that the host's rule is expected to give.
            clip_norm: the host's own L2 norm, which the settings override; None leaves gradients untouched.
            scaler: a `torch.amp.GradScaler`, or None.
            average: moved after every update that happened.
            groups: parameters by loss group, where a host has several normalisers.
            schedule: sets the rates of an update; it is given the update's index.
            dims: dimensions of the input that vary, for the compiler.
            takes: which calls of the model to compile, by their positional arguments.
            sync: reduce gradients over ranks here, once an update.
            uncompilable: why this model's forward cannot be compiled, where it cannot.

        Raises:
            ValueError: what cannot be served, in one line; the model is as it was then.
        """


@dataclass(frozen=True)
class HostTools:
    """What a plug hands to its adapter from the core, for any number of runs.

    Attributes:
        config: the settings.
        start: precision and memory format to begin with, on a device.
        new_session: builds the session of a run.
        average: a moving average of a model's weights as the settings ask, or None.
        reestimate: sets BatchNorm's statistics over batches, given the forward of one (`batchnorm=precise`).
        files: atomic writes, extra state, random state.
        free_gib: memory that is free now, of a device.
    """

    config: Config
    start: Callable[[torch.device], Start]
    new_session: NewSession
    average: Callable[[nn.Module], WeightAverage | None]
    reestimate: Callable[[nn.Module, Iterable[Any], Callable[[Any], Any]], int]
    files: Files
    free_gib: Callable[[torch.device], float]
