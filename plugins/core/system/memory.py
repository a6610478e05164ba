"""Peaks of memory in GiB: the first update's and the steady ones', apart.

Where the device keeps a peak (CUDA, XPU), the allocator's own; elsewhere the process's resident peak (VmHWM), which
Linux lets a process reset.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import torch

from plugins.core.system import devices
from plugins.core.system.shortage import GIB, says_short

CONTEXT_GIB = 0.8  # of a second process on the same device: torch, its compiler, a CUDA context
CUDA_GRAPHS = 0.10  # of the peak: what a pool of CUDA graphs takes on top (5 to 10 % seen)
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Of control groups of version 2 and 1: controller, folder, limit, use, and what of memory.stat can go.
_LIMITS = (
    ("", ".", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Peaks:
    """Call `update_done` after every update; read `first_gib` and `steady_gib` at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type if devices.peak(device) is not None else "rss"
        self.first_gib: float | None = None
        self.steady_gib: float | None = None
        self._reset()

    def update_done(self) -> None:
        """The first call reads the first update's peak and begins the steady one; later calls cost nothing."""
        if self.first_gib is None:
            self.first_gib = self._peak()
            self._reset()

    def end(self) -> None:
        """Read the peak of the steady updates."""
        if self.first_gib is not None:
            self.steady_gib = self._peak()

    def _peak(self) -> float:
        if (peak := devices.peak(self.device)) is not None:
            return peak / GIB
        for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB

    def _reset(self) -> None:
        if self.kind != "rss":
            devices.reset_peak(self.device)
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # Linux: begin the resident peak anew; elsewhere it is the whole run's


@cache
def _process() -> psutil.Process:
    return psutil.Process()


def in_use_gib(device: torch.device) -> float:
    """Memory in use now: the allocator's on an accelerator, else this process's resident memory."""
    held = devices.allocated(device)
    return (int(_process().memory_info().rss) if held is None else held) / GIB


def free_gib(device: torch.device) -> float:
    """Memory that another process could take now."""
    if (free := devices.free(device)) is not None:
        return free / GIB
    return float(min(psutil.virtual_memory().available, _left_of_container()) / GIB)


def limit_gib(device: torch.device) -> float | None:
    """All that a process alone could have of the memory whose peak is kept; None where the device does not say."""
    own = devices.peak(device) is not None
    return None if own and devices.total(device) is None else total_gib(device if own else torch.device("cpu"))


def total_gib(device: torch.device) -> float:
    """All that processes may hold on this device: its own memory, or this machine's and its container's."""
    if (total := devices.total(device)) is not None:
        return total / GIB
    limits = [float(psutil.virtual_memory().total)]
    for group, limit, *_ in _groups():
        with contextlib.suppress(OSError, ValueError):  # no such group, or `max`: no limit
            limits.append(float((group / limit).read_text()))
    return min(limits) / GIB


def _left_of_container() -> float:
    """Bytes below the limit of this process's control group, or of one that holds it; cached files can go."""
    left = math.inf
    for group, limit, use, cached in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or `max`: no limit
            stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
            most, used = (int((group / file).read_text()) for file in (limit, use))
            left = min(left, max(most - used + int(stat[cached]), 0))
    return left


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Where the memory of this process may be limited, with the names of limit, use and what can go."""
    for line in _GROUPS.read_text().splitlines() if _GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        inside = Path(path.lstrip("/"))
        for name, folder, *files in _LIMITS:
            if name in controllers.split(","):
                for group in (inside, *inside.parents):  # inside a container the mount itself is its group
                    yield (_MOUNT / folder / group, *files)  # type: ignore[misc]


def room_for_worker(device: torch.device, part: float = 1) -> bool:
    """Whether a second process fits beside this one, which runs one step of this model on a `part`th of the batch."""
    return free_gib(device) > _peak_gib(device) / part + CONTEXT_GIB


def room_for_twice(device: torch.device) -> bool:
    """Whether this process could come to twice the memory that it had at its peak."""
    peak = _peak_gib(device)
    return free_beyond_gib(device, peak) > peak


def _peak_gib(device: torch.device) -> float:
    """Of the allocator, where the device keeps one; else what is in use now."""
    peak = devices.peak(device)
    return in_use_gib(device) if peak is None else peak / GIB


def free_beyond_gib(device: torch.device, peak_gib: float) -> float:
    """Memory that is left when this process is at a peak it had; freed blocks of the allocator count as free.

    Args:
        device: the accelerator, or the CPU.
        peak_gib: of this process.
    """
    held = devices.reserved(device)
    return free_gib(device) + (in_use_gib(device) if held is None else held / GIB) - peak_gib


def room_for_cuda_graphs(device: torch.device) -> bool:
    """Forecast of a plan with CUDA graphs against what is free; freed blocks of the allocator count as free."""
    peak, held = devices.peak(device), devices.reserved(device)
    if peak is None or held is None:
        return True
    return free_gib(device) * GIB + held - peak > CUDA_GRAPHS * peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, of an accelerator or of this machine."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and says_short(str(error))


def let_go(error: BaseException) -> None:
    """Drop what the frames of a caught error hold: the tensors of the forward that failed, and its graph."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__context__
