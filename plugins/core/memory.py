"""Peaks of memory in GiB: the first update's and the steady ones', apart.

On CUDA the allocator's own peak; elsewhere the process's resident peak (VmHWM), which Linux lets a process reset.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

GIB = 1024**3
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Peaks:
    """Call `update_done` after every update; read `first_gib` and `steady_gib` at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "cuda" if device.type == "cuda" else "rss"
        self.first_gib: float | None = None
        self.steady_gib: float | None = None
        self._reset()

    def update_done(self) -> None:
        """The first call reads the first update's peak and begins the steady one; later calls cost nothing."""
        if self.first_gib is None:
            self.first_gib = self._peak()
            self._reset()

    def end(self) -> None:
        if self.first_gib is not None:
            self.steady_gib = self._peak()

    def _peak(self) -> float:
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB

    def _reset(self) -> None:
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # Linux: begin the resident peak anew; elsewhere it is the whole run's
