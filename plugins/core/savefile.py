"""The one file that a hand-written loop saves and resumes from: plain values and tensors, read without pickled code."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plugins.core.checkpoint import write_atomically
from plugins.errors import AccelError

SCHEMA = 1
STATE = {"model", "optimizer", "average", "window", "counts", "random", "extra"}  # at least


def write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save({"accel": SCHEMA, **state}, file))


def read(path: Path) -> dict[str, Any]:
    """Raises AccelError on a missing, damaged or foreign file."""
    if not path.is_file():
        raise AccelError(f"{path}: no such file; expected a checkpoint that `save` wrote")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = type(error).__name__  # torch's own text is several lines of advice
        raise AccelError(f"{path}: not readable as a checkpoint ({why})") from None
    if not isinstance(state, dict) or state.get("accel") != SCHEMA or not state.keys() >= STATE:
        raise AccelError(f"{path}: not a checkpoint of schema {SCHEMA} that `save` wrote")
    return state


def refuse_other(path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises AccelError where the state is one of another model or optimizer than these."""
    here, there = model.state_dict(), state["model"]
    odd = next((name for name in {**here, **there} if _shape(here, name) != _shape(there, name)), None)
    if odd is not None:
        raise AccelError(f"{path}: of another model: {odd} is {_shape(there, odd)} there, {_shape(here, odd)} here")
    if why := _other_optimizer(state["optimizer"], optimizer):
        raise AccelError(f"{path}: saved with another optimizer than {type(optimizer).__name__}: {why}")


def check_plain(extra: dict[str, Any]) -> None:
    """Raises AccelError on what could not be read back."""
    for name, value in extra.items():
        held = io.BytesIO()
        try:
            torch.save(value, held)
            held.seek(0)
            torch.load(held, weights_only=True)
        except Exception:
            kind = type(value).__name__
            raise AccelError(
                f"save: {name} holds {kind}; allowed are numbers, text, tensors, lists and dicts"
            ) from None


def _shape(state: dict[str, Any], name: str) -> Any:
    return list(state[name].shape) if name in state else "missing"


def _other_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """Why the state is not one of this optimizer, or empty."""
    here, there = optimizer.state_dict()["param_groups"], state["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (here, there)]
    if sizes[0] != sizes[1]:
        return f"groups of {sizes[1]} parameters there, of {sizes[0]} here"
    missing = sorted({name for a, b in zip(here, there, strict=True) for name in a.keys() - b.keys()} - {"initial_lr"})
    return f"it has no {', '.join(missing)}" if missing else ""
