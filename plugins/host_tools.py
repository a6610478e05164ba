"""What every plug hands to its adapter from the core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from integrations.contract import HostTools, NewSession, WeightAverage
from integrations.contract import Session as SessionContract
from plugins.config import AccelConfig
from plugins.core import checkpoint
from plugins.core.autotune.plan_file import Start
from plugins.core.session import RunSpec, Session
from plugins.core.step.batchnorm import reestimate
from plugins.core.step.ema import EMA
from plugins.core.system.memory import free_gib
from plugins.trial_run.child import watched


def host_tools(config: AccelConfig, host: str, say: Callable[[str], None], packages: tuple[str, ...] = ()) -> HostTools:
    """The core's parts for one plug.

    Args:
        config: the settings.
        host: the plug's name in the report.
        say: shows a line to the user.
        packages: distributions whose versions the report names.
    """

    def new_session(model: nn.Module, optimizer: torch.optim.Optimizer, **built: Any) -> SessionContract:
        return watched(Session(RunSpec(config, host, model, optimizer, say=say, packages=packages, **built)))

    build: NewSession = new_session
    return HostTools(
        config=config,
        start=partial(Start.of, config),
        new_session=build,
        average=partial(_average, config),
        reestimate=reestimate,
        files=checkpoint,
        free_gib=free_gib,
    )


def _average(config: AccelConfig, model: nn.Module) -> WeightAverage | None:
    return None if isinstance(config.ema, str) else EMA(model, config.ema)
