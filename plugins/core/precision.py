"""Autocast dtype: what a device can do, and what `auto` becomes."""

from __future__ import annotations

import torch


class Unsupported(ValueError):
    """A precision that this device cannot train in; the message is one line."""


def bf16_is_fast(device: torch.device) -> bool:
    """True where bf16 has instructions of its own: Ampere and later, or a CPU with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        cpu = torch.cpu
        return bool(
            getattr(cpu, "_is_amx_tile_supported", lambda: False)()
            or getattr(cpu, "_is_avx512_bf16_supported", lambda: False)()
        )
    return False


def resolve(precision: str, device: torch.device) -> str:
    """Turn `auto` into bf16 or fp32 for this device; other values pass through.

    Raises:
        Unsupported: fp16 on a device whose autocast or GradScaler cannot train in it.
    """
    if precision == "auto":
        return "bf16" if bf16_is_fast(device) else "fp32"
    if precision == "fp16" and device.type == "cpu":
        raise Unsupported("precision=fp16: not on a CPU; allowed here are host, auto, fp32, bf16")
    return precision
