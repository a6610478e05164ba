"""How many micro-batches one update takes: from `accumulate`, from `effective_batch`, or as the host has it."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from integrations.refusal import UnsupportedRun

Host = TypeVar("Host", int, None)


def micro_batches_per_update(
    config: Any, step: int, *, host: Host, named: str, allowed: str = "", rounded: bool = False
) -> int | Host:
    """K, the micro-batches of one update.

    Args:
        config: with `accumulate` and `effective_batch`, of which at most one is no "host".
        step: samples of one micro-batch over all devices.
        host: K where the settings leave it to the host.
        named: how the host's user calls these samples, for the message.
        allowed: what is allowed, for the message; default: the two multiples next to the value.
        rounded: the user did not choose `step`: an effective batch that is no multiple is rounded up.

    Raises:
        UnsupportedRun: the effective batch is not a whole number of micro-batches.
    """
    if config.accumulate != "host":
        return int(config.accumulate)
    if config.effective_batch == "host":
        return host
    wanted = int(config.effective_batch)
    if wanted % step and not rounded:
        below = wanted // step * step
        near = f"{below} or {below + step}" if below else str(step)
        raise UnsupportedRun(
            f"effective_batch={wanted}: not a multiple of {named}; {allowed or f'allowed near it: {near}'}"
        )
    return math.ceil(wanted / step)
