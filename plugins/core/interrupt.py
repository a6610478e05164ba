"""Ctrl-C and SIGTERM as a wish: the update in progress is finished and everything saved, then the run stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Gives an event that SIGINT and SIGTERM set; a second one raises KeyboardInterrupt at once.

    Outside the main thread, where Python takes no signals, the event is never set.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_rank(value: bool, device: torch.device) -> bool:
    """Whether any process says yes: all leave a loop at the same update. One small all-reduce; none alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    votes = torch.tensor(float(value), device=device)
    dist.all_reduce(votes)
    return bool(votes)


def from_first(value: int, device: torch.device) -> int:
    """Rank 0's number on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    told = torch.tensor(value, device=device)
    dist.broadcast(told, src=0)
    return int(told)
