"""`lr_scale`: the learning rate when an update has another number of samples than the host's own."""

from __future__ import annotations

import math


def rate_factor(rule: str, ratio: float) -> float:
    """What the base learning rates are multiplied by.

    Args:
        rule: off, sqrt or linear.
        ratio: effective batch of the run over that of the host alone.
    """
    return {"off": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]
