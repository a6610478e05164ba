"""Freed memory that stays with the process, where giving it back costs time.

glibc gives a large freed block back to the system at once, so that every step meets its activations' pages anew: a
fault of a page is about 1.5 microseconds, and on a CPU faults took 8 to 25 % of a training step. A run counts its own;
where they cost more than a twentieth of an update, and memory is free for it, blocks are kept for the next step.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import time
import weakref
from collections.abc import Callable
from functools import cache

import torch

from plugins.core.system.memory import free_gib

FAULT_SECONDS = 1.5e-6  # of a page's fault, its zeroing included; 1.3 to 1.8 measured
WORTH = 0.05  # of an update: pieces that do not fit again take 5 % more memory
UPDATES = 3  # that are counted, after the first, and before other plans are timed: new shapes bring faults of their own
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # glibc's malloc.h
KEEP = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}
# Once set, glibc no longer moves its thresholds with the sizes it meets: afterwards they stay at the most it moves to.
RELEASE = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}


class FreedMemory:
    """Call `update_done` after every update: the first few decide. `release` at the end of the run.

    Attributes:
        kept: what was found, where freed memory is kept; else empty.
    """

    def __init__(self, device: torch.device) -> None:
        self.kept = ""
        self._left = UPDATES if device.type == "cpu" and _glibc() is not None else 0
        self._began: tuple[int, float] | None = None
        self._let_go: Callable[[], object] = lambda: None

    def update_done(self, peak_gib: float) -> None:
        """`peak_gib`: the process's; pieces that are kept and do not fit again may come to as much."""
        if not self._left:
            return
        faults, now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        if self._began is None:  # the first update meets all its pages for the first time
            self._began = faults, now
            return
        self._left -= 1
        if self._left:
            return
        faults, seconds = faults - self._began[0], now - self._began[1]
        share = faults * FAULT_SECONDS / seconds
        if share > WORTH and free_gib(torch.device("cpu")) > peak_gib and _set(KEEP):
            self.kept = f"freed memory is kept: {faults // UPDATES:,} page faults were about {share:.0%} of an update"
            _holders.add(id(self))
            self._let_go = weakref.finalize(self, _let_go, id(self))  # also of a run that nobody ends

    def release(self) -> None:
        """Give back what is free, and from now on what is freed."""
        self._left = 0
        self._let_go()


_holders: set[int] = set()  # runs for which this process keeps its memory


def _let_go(holder: int) -> None:
    """The last one gives back what is free."""
    _holders.discard(holder)
    if not _holders and _glibc() is not None:
        _set(RELEASE)
        trim()


def trim() -> None:
    """Give back to the system what is free, where the allocator is glibc's."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _set(values: dict[int, int]) -> bool:
    """Whether the allocator took them all; another one, loaded in glibc's place, may not."""
    mallopt: Callable[[int, int], int] | None = getattr(_glibc(), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) for name, value in values.items())
