"""What the devices of this machine are and can do: the one place that asks torch's device modules.

CUDA (ROCm answers under that name), XPU, MPS, and any other accelerator that torch knows. Each is asked through its
own module, `torch.get_device_module`; what a module does not have is answered as None, False or nothing to do, as on
the CPU. What was seen to work on which device is written in docs/devices.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
PINNED = ("cuda", "xpu")  # devices that copy faster from pinned memory
INDUCTOR = ("cpu", "cuda", "xpu", "mps")  # devices that inductor writes code for
TRITON = ("cuda", "xpu")  # those of them for which it writes Triton


# -- which there are ---------------------------------------------------------------------------------------------


def accelerator() -> str:
    """The type of this machine's accelerator, such as `cuda`; empty where there is none."""
    if not torch.accelerator.is_available():
        return ""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else ""


def own() -> torch.device:
    """The device that this process trains on: its current accelerator, else the CPU."""
    kind = accelerator()
    return torch.device(kind, _ask(kind, "current_device", 0)) if kind else CPU


def every() -> list[torch.device]:
    """The CPU and all accelerators that this process sees."""
    kind = accelerator()
    return [CPU, *(torch.device(kind, index) for index in range(_ask(kind, "device_count", 0) if kind else 0))]


def use(index: int) -> None:
    """Makes the accelerator of this index the process's current one; nothing without accelerators."""
    if kind := accelerator():
        _ask(kind, "set_device", None, index)


def backend() -> str:
    """The name of the collectives' backend for `own()`, such as nccl; gloo on the CPU."""
    return str(dist.Backend.default_device_backend_map.get(accelerator() or "cpu", "gloo"))


def collective_device() -> torch.device:
    """Where a small tensor must lie to be reduced over the ranks that have joined."""
    return CPU if dist.get_backend() == "gloo" else own()


def name(device: torch.device) -> str:
    """The device's own name, such as `NVIDIA H100`; its type where it has none."""
    return str(_ask(device, "get_device_name", device.type, device)) if device.type != "cpu" else "cpu"


# -- memory and time ---------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; nothing on a CPU."""
    if device.type == "mps":
        torch.mps.synchronize()  # takes no device
    elif device.type != "cpu":
        _ask(device, "synchronize", None, device)


def empty_cache(device: torch.device) -> None:
    """Gives the allocator's free blocks back to the device."""
    if device.type != "cpu":
        _ask(device, "empty_cache", None)


def allocated(device: torch.device) -> int | None:
    """Bytes of tensors on the device; None where its memory is not counted, as on a CPU."""
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return _bytes(device, "memory_allocated")


def reserved(device: torch.device) -> int | None:
    """Bytes that the allocator holds, free blocks included; None where they are not counted."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return _bytes(device, "memory_reserved")


def peak(device: torch.device) -> int | None:
    """The most bytes of tensors since `reset_peak`; None where no peak is kept (CPU, MPS)."""
    return _bytes(device, "max_memory_allocated")


def reset_peak(device: torch.device) -> None:
    """Begins the peak anew."""
    if device.type != "cpu":
        _ask(device, "reset_peak_memory_stats", None, device)


def free(device: torch.device) -> int | None:
    """Bytes that a process could still take; None where the device does not say."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)
    found = _ask(device, "mem_get_info", None, device)
    return int(found[0]) if found is not None else None


def total(device: torch.device) -> int | None:
    """Bytes that the device has in all; None where it does not say, as a CPU."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    found = _ask(device, "mem_get_info", None, device)
    return int(found[1]) if found is not None else None


def limit(device: torch.device, most: int) -> None:
    """Lets this process take at most so many bytes of the device; nothing where the device cannot be asked to."""
    if (has := total(device)) is not None:
        _ask(device, "set_per_process_memory_fraction", None, min(most / has, 1.0), device)


# -- what they can do --------------------------------------------------------------------------------------------


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 has instructions of its own: Ampere and later, or a CPU with AMX or AVX512-BF16.

    MPS does not say, and counts as without.
    """
    if device.type == "cpu":
        return bool(_ask(device, "_is_amx_tile_supported", False) or _ask(device, "_is_avx512_bf16_supported", False))
    emulated = (False,) if device.type in TRITON else ()  # not counted where it may be; no parameter elsewhere
    return bool(_ask(device, "is_bf16_supported", False, *emulated))


def has_autocast(device: torch.device) -> bool:
    """Whether autocast knows this type of device."""
    return torch.amp.is_autocast_available(device.type)


def in_autocast() -> str:
    """The type of device whose autocast is active here; empty where none is."""
    kinds = ("cpu", accelerator() or "cuda")
    return next((kind for kind in kinds if torch.is_autocast_enabled(kind)), "")


def scales_gradients(device: torch.device) -> bool:
    """Whether fp16 with a gradient scaler is trained here: on accelerators, where the scaler's operator exists."""
    return device.type == "cuda" or (device.type != "cpu" and has_autocast(device) and _has_scaler(device.type))


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in double precision: MPS does not, nor do some of Intel's."""
    return device.type != "mps" and (device.type != "xpu" or _xpu_has_float64(device))


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether inductor can capture a step in CUDA graphs."""
    return device.type == "cuda"


def pins(device: torch.device) -> bool:
    """Whether copies to the device gain by pinned memory."""
    return device.type in PINNED


# -- random state ------------------------------------------------------------------------------------------------


def random_states() -> list[Tensor]:
    """The generators' states of this process's accelerators; empty where there is none."""
    return [_module(device).get_rng_state(device) for device in every()[1:]]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Puts `random_states` back; states of another number of devices are left out."""
    devices = every()[1:]
    if len(devices) == len(states):
        for device, state in zip(devices, states, strict=True):
            _module(device).set_rng_state(state.cpu(), device)


# -- torch's device modules --------------------------------------------------------------------------------------


def _module(device: torch.device | str) -> Any:
    return torch.get_device_module(device)


def _ask(device: torch.device | str, what: str, otherwise: Any, *args: Any) -> Any:
    """What the device's module answers, or `otherwise` where it has no such function."""
    try:
        function = getattr(_module(device), what, None)
    except RuntimeError:  # a type without a module, such as meta
        function = None
    return function(*args) if function is not None else otherwise


def _bytes(device: torch.device, what: str) -> int | None:
    found = _ask(device, what, None, device) if device.type != "cpu" else None
    return int(found) if found is not None else None


@cache
def _has_scaler(kind: str) -> bool:
    """Tries the operator: MPS has it since torch 2.8 or so."""
    try:
        found, inverse = torch.zeros(1, device=kind), torch.ones(1, device=kind)
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1, device=kind)], found, inverse)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@cache
def _xpu_has_float64(device: torch.device) -> bool:
    return bool(getattr(_module(device).get_device_properties(device), "has_fp64", True))
