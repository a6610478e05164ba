"""What each rank of a sharded run has of its own, in the one file that the first rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from plugins.core.system.distributed import from_all_ranks
from plugins.core.system.sharding import whole
from plugins.errors import AccelError

FIELD = "by_rank"
_OWN = ("random", "window", "kept_statistics")  # counts of an open window are this rank's, not all ranks'


def with_all_ranks(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state with every sharded tensor whole, and each rank's own part beside it. Collective.

    Buffers are each rank's own: BatchNorm's statistics are of what it has seen.
    """
    buffers = {name for name, _ in model.named_buffers()}
    own = {name: state[name] for name in _OWN} | {
        "model": _of(state["model"], buffers),
        "shadow": _of(state["average"].get("shadow", {}), buffers),
    }
    return {**whole(state), FIELD: from_all_ranks(own)}


def of_this_rank(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as this rank left it; of a file that no sharded run wrote, the state itself.

    Raises:
        AccelError: another number of ranks wrote it in the middle of a window.
    """
    parts = state.get(FIELD)
    if parts is None:
        return dict(state)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if len(parts) != world:
        if state["window"]["micro_batches"]:
            raise AccelError(
                f"{path}: saved by {len(parts)} ranks in the middle of a window, and here are {world}; save after an "
                "update to go on with another number"
            )
        return dict(state)
    own = dict(parts[dist.get_rank() if world > 1 else 0])
    merged = {**state, **{name: own[name] for name in _OWN}, "model": {**state["model"], **own["model"]}}
    if own["shadow"]:
        merged["average"] = {**state["average"], "shadow": {**state["average"]["shadow"], **own["shadow"]}}
    return merged


def _of(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}
