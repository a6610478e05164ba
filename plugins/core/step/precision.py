"""Autocast dtype: what a device can do, and what `auto` becomes."""

from __future__ import annotations

import torch

from plugins.core.system import devices
from plugins.errors import AccelError

HALF = ("bf16", "fp16")


class Unsupported(AccelError):
    """A precision that this device cannot train in; the message is one line."""


def bf16_is_fast(device: torch.device) -> bool:
    """True where bf16 has instructions of its own: Ampere and later, or a CPU with AMX or AVX512-BF16."""
    return devices.has_fast_bf16(device)


def resolve(precision: str, device: torch.device) -> str:
    """Turn `auto` into bf16 or fp32 for this device; other values pass through.

    Raises:
        Unsupported: fp16 on a device whose autocast or GradScaler cannot train in it.
    """
    if precision == "auto":
        return "bf16" if bf16_is_fast(device) else "fp32"
    if precision == "fp16" and not devices.scales_gradients(device):
        where = "a CPU" if device.type == "cpu" else f"{device.type} here"
        raise Unsupported(f"precision=fp16: not on {where}; allowed here are host, auto, fp32, bf16")
    return precision
