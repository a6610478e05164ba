"""Tensors that are sharded over ranks (FSDP2's `fully_shard`, any DTensor): their shards, norm, and whole.

What is elementwise (an average, a factor, clipping) is done on each rank's own shard. What is not (a norm, a file) goes
through DTensor, which knows how the shards lie; those are collectives, which every rank has to call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor. Its module is slow to import, and where nobody has imported it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def holds_shards(model: nn.Module) -> bool:
    """Whether parameters of the model are sharded, also while some of them are gathered for a forward."""
    return bool(_units(model)) or any(is_sharded(parameter) for parameter in model.parameters())


def shard(tensor: Tensor) -> Tensor:
    """This rank's own part, which shares memory with the tensor; the tensor itself where it is not sharded."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(value: Any) -> Any:
    """The same dicts, lists and values; sharded tensors gathered, one after the other, on the CPU. Collective."""
    return tree_map(lambda item: item.detach().full_tensor().cpu() if is_sharded(item) else item, value)


def placed_as(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, sharded as `like` is; as it is where that is not sharded. No collective."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    here = DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return here.redistribute(mesh, like.placements)  # type: ignore[attr-defined, no-any-return]


def placed_for(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """A state of this optimizer in whole tensors, those of a sharded parameter's shape sharded as it is.

    Without sharded parameters it is the state itself, of whatever form.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(is_sharded(parameter) for parameter in parameters):
        return state

    def placed(value: Any, parameter: Tensor) -> Any:
        fits = isinstance(value, Tensor) and value.shape == parameter.shape
        return placed_as(value, parameter) if fits else value

    held = state["state"]
    states = {at: {n: placed(v, parameters[at]) for n, v in values.items()} for at, values in held.items()}
    return {**state, "state": states}


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm over all tensors and all their shards, the same number on every rank. Collective where sharded.

    Plain tensors alone: torch's own, to its last bit. Sparse ones by their values, of which torch 2.10 takes no norm.
    """
    meshes: dict[Any, list[Tensor]] = {}
    for tensor in (t.coalesce().values() if t.is_sparse else t for t in tensors):
        meshes.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)  # type: ignore[attr-defined]
    norms = [torch.nn.utils.get_total_norm(group) for group in meshes.values()]
    norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))


def reshard(model: nn.Module) -> None:
    """Let go of what FSDP2 has gathered and would keep: a forward without backward leaves the root's parameters whole.

    Until then `parameters()` gives other tensors than the optimizer holds, and the next forward would not see a weight
    that has changed.
    """
    for unit in _units(model):
        unit.reshard()


def copy_by_name(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put whole values, which every rank has, into live tensors."""
    with torch.no_grad():
        for name, value in values.items():
            live[name].copy_(placed_as(value, live[name]))


def _units(model: nn.Module) -> list[Any]:
    """The modules on which `fully_shard` was called."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FSDPModule", None)
    return [m for m in model.modules() if isinstance(m, kind)] if kind is not None else []
