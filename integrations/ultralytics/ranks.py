"""Several processes of the host's DDP: who reduces gradients, and what each has of its own in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ultralytics.utils import RANK


def several(trainer: Any) -> bool:
    """Whether this process is one of several."""
    return isinstance(trainer.model, DistributedDataParallel)


def hold_reduction(trainer: Any, accumulates: bool) -> bool:
    """Keep the host from reducing gradients in every backward of a window; True where the core does it at the close."""
    if not (accumulates and several(trainer)):
        return False
    trainer.model.require_backward_grad_sync = False
    return True


def give_back_reduction(trainer: Any) -> None:
    """Undo `hold_reduction`."""
    if several(trainer):
        trainer.model.require_backward_grad_sync = True


class RankStates:
    """What differs from rank to rank, gathered at the end of every epoch: the host saves on rank 0 alone.

    Args:
        own: this rank's part, in plain values and tensors.
    """

    def __init__(self, trainer: Any, own: Callable[[], dict[str, Any]]) -> None:
        self.trainer, self.own = trainer, own
        self.gathered: list[dict[str, Any]] = []

    def gather(self) -> None:
        """At an epoch's end, on every rank; nothing where there is one alone."""
        if several(self.trainer):
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, self.own())
            self.gathered = found


def of_this_rank(trainer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as this rank left it; rank 0's for all where another number of ranks saved it."""
    parts = state.get("ranks", [])
    if several(trainer) and 0 < RANK < len(parts) == dist.get_world_size():  # rank 0's own is newer: of its save
        return {**state, **parts[RANK]}
    return dict(state)
