"""Several processes of one run: joining them, and the few facts that they must agree on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.core.system import devices
from plugins.core.system.sharding import is_sharded


@contextmanager
def joined() -> Iterator[int]:
    """Gives this process's rank; joins the others where `torchrun` started several and nobody did so before."""
    ours = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if ours:
        devices.use(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(devices.backend())
    try:
        yield dist.get_rank() if dist.is_initialized() else 0
    finally:
        if ours:
            dist.destroy_process_group()


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


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_start(held: nn.Module | Iterable[Tensor]) -> None:
    """Rank 0's weights and buffers on every rank. Sharded ones stay: each rank has a part of its own."""
    tensors = [*held.parameters(), *held.buffers()] if isinstance(held, nn.Module) else held
    for tensor in tensors:
        if is_sharded(tensor):
            continue
        dist.broadcast(tensor.detach(), src=0)
