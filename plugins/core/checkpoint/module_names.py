"""A module's own names and class, without what compile and parallel wrappers put around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plugins.core.system.sharding import placed_as


def clean_key(key: str) -> str:
    """A state-dict key without what compile and parallel wrappers put in front."""
    return key.replace("_orig_mod.", "").removeprefix("module.")


def own_name(name: str) -> str:
    """A bare model's name of a parameter, without what `torch.compile` of a part of it put in between."""
    return name.replace("_orig_mod.", "")


def own_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state dict under its own names."""
    return {own_name(name): value for name, value in model.state_dict().items()}


def load_own_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """The opposite of `own_state`, whatever of the model is compiled now."""
    here = {own_name(name): (name, value) for name, value in model.state_dict().items()}
    placed = {name: (name, value) for name, value in state.items()}
    for name, (full, live) in here.items():
        if name in placed:
            placed[name] = full, placed_as(state[name], live)
    model.load_state_dict(dict(placed.values()))


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The host's own module inside DistributedDataParallel and an `OptimizedModule`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner
