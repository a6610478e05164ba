"""The one file that a hand-written loop saves and resumes from: plain values and tensors, read without pickled code."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from plugins.core.checkpoint.atomic_file import on_cpu, write_atomically
from plugins.core.checkpoint.by_rank import of_this_rank, with_all_ranks
from plugins.core.checkpoint.module_names import load_own_state, own_state
from plugins.core.checkpoint.plain_file import NotPlain, read_plain
from plugins.core.system.sharding import holds_shards, is_sharded
from plugins.errors import AccelError

SCHEMA = 1
STATE: dict[str, type | tuple[type, ...]] = {  # at least; and of which kind
    "model": dict, "optimizer": (dict, list), "scaler": dict, "average": dict, "window": dict, "gradients": dict,
    "kept_statistics": list, "counts": dict, "random": dict, "extra": dict,
}  # fmt: skip


class Run(Protocol):
    """What is saved of a session, and compared with a file."""

    @property
    def config(self) -> Any:
        """The settings in force."""

    @property
    def report(self) -> Any:
        """The report, which lists the checkpoints."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that steps."""

    @property
    def average(self) -> Any:
        """The averaged weights, or None."""

    def beside_model(self) -> list[nn.Parameter]:
        """Parameters that the optimizer holds and the model does not."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: the run without its scheduler."""


def save(path: Path, session: Run, scheduler: Any, **more: Any) -> None:
    """Write everything that a bit-for-bit resume needs, atomically, and `more` beside it.

    Of a model that is sharded over ranks the file holds the whole: all ranks call it, and the first one writes.

    Raises:
        AccelError: something in it could not be read back; nothing is written.
    """
    held = {"kinds": kinds(session.optimizer, scheduler), "parameter_shapes": _shapes(session.optimizer)}
    state = {**session.state_dict(), **held, **more}
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    check_plain(state["extra"])
    check_plain({name: value for name, value in state.items() if name != "extra"}, of="the run's state of ")
    sharded = holds_shards(session.model)
    if sharded:
        state = with_all_ranks(state, session.model)
    if not sharded or dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: torch.save({"accel": SCHEMA, **on_cpu(state)}, file))
    if sharded:
        dist.barrier()  # whoever comes back can read it
    if str(path) not in session.report.checkpoints:
        session.report.checkpoints.append(str(path))


def read(path: Path) -> dict[str, Any]:
    """Raises AccelError on a missing, damaged or foreign file."""
    if not path.is_file():
        raise AccelError(f"{path}: no such file; expected a checkpoint that `save` wrote")
    try:
        state = read_plain(path)
    except NotPlain as error:
        raise AccelError(f"{path}: not readable as a checkpoint ({error})") from None
    if not isinstance(state, dict) or state.get("accel") != SCHEMA:
        raise AccelError(f"{path}: not a checkpoint of schema {SCHEMA} that `save` wrote")
    if odd := [name for name, kind in STATE.items() if not isinstance(state.get(name), kind)]:
        raise AccelError(f"{path}: damaged: {odd[0]} is {type(state.get(odd[0])).__name__}")
    return dict(state)


def kinds(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """What the numbers of a state belong to."""
    return {"optimizer": type(optimizer).__name__, "schedule": type(scheduler).__name__ if scheduler else "none"}


def belonging(path: Path, session: Run, scheduler: Any) -> dict[str, Any]:
    """The state in `path`, which is one of this run's model, optimizer, average and schedule.

    Raises:
        AccelError: a missing, damaged or foreign file, or one of another model, optimizer, average or schedule.
    """
    state, model, optimizer = read(path), session.model, session.optimizer
    here, there = own_state(model), state["model"]
    odd = next((name for name in {**here, **there} if _shape(here, name) != _shape(there, name)), None)
    if odd is not None and not _takes(model, there):
        raise AccelError(f"{path}: of another model: {odd} is {_shape(there, odd)} there, {_shape(here, odd)} here")
    for name, kind in kinds(optimizer, scheduler).items():
        if (saved := state.get("kinds", {}).get(name, kind)) != kind:
            raise AccelError(f"{path}: saved with another {name} than this run's: {saved} there, {kind} here")
    beside = [list(parameter.shape) for parameter in session.beside_model()]
    saved_beside = [list(value.shape) for value in state.get("beside_model", [])]
    if "beside_model" in state and saved_beside != beside:
        raise AccelError(
            f"{path}: of other parameters that the optimizer holds beside the model: {saved_beside} there, "
            f"{beside} here"
        )
    if why := _other_optimizer(state, optimizer):
        raise AccelError(f"{path}: saved with another optimizer than {type(optimizer).__name__}: {why}")
    if bool(state["average"]) != (session.average is not None):
        saved_how = "with" if state["average"] else "without"
        raise AccelError(f"ema={session.config.ema}: {path} was saved {saved_how} an EMA; resume with the same setting")
    return of_this_rank(path, state)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Inside, what is read from `path` may lack anything: that is one line, and no traceback.

    Raises:
        AccelError
    """
    try:
        yield
    except AccelError:
        raise
    except Exception as error:
        raise AccelError(f"{path}: damaged: {type(error).__name__}: {str(error)[:200]}") from error


def check_plain(values: Mapping[str, Any], of: str = "") -> None:
    """Raises AccelError on what could not be read back; `of`: whose values they are, in an error."""
    for name, value in values.items():
        held = io.BytesIO()
        try:
            torch.save(on_cpu(tree_map(lambda leaf: None if _is_plain(leaf) else leaf, value)), held)
            held.seek(0)
            torch.load(held, weights_only=True)
        except Exception as error:
            found = re.search(r"GLOBAL (\S+)", str(error))  # of the class that a reader would have to trust
            kind = found[1].rpartition(".")[2] if found else type(value).__name__
            raise AccelError(
                f"save: {of}{name} holds {kind}; allowed are numbers, text, tensors, lists and dicts, and classes that "
                "torch.serialization.add_safe_globals was given"
            ) from None


def _is_plain(leaf: Any) -> bool:
    """Whether any reader takes this tensor: it has values, is not of a user's class, and nothing of his is on it.

    A sharded one is gathered into a plain one before it is written.
    """
    return is_sharded(leaf) or (type(leaf) in (Tensor, nn.Parameter) and not vars(leaf) and not leaf.is_meta)


def _takes(model: nn.Module, state: dict[str, Any]) -> bool:
    """Whether the model makes room for this state as it loads it, as observers of a quantisation do."""
    try:
        load_own_state(copy.deepcopy(model), state)
    except Exception:
        return False
    return True


def _shape(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        return "missing"
    return list(state[name].shape) if isinstance(state[name], Tensor) else type(state[name]).__name__


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]


def _other_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """Why the state in a file is not one of this optimizer, or empty.

    An optimizer around others may have a state dict of its own form: it is compared by its parameters alone.
    """
    state, live = saved["optimizer"], optimizer.state_dict()
    own_form = not all(isinstance(held, Mapping) and {"param_groups", "state"} <= held.keys() for held in (state, live))
    if not own_form:
        here, there = live["param_groups"], state["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (here, there)]
        if sizes[0] != sizes[1]:
            return f"groups of {sizes[1]} parameters there, of {sizes[0]} here"
        named = {name for a, b in zip(here, there, strict=True) for name in a.keys() - b.keys()}
        if missing := sorted(named - {"initial_lr"}):
            return f"it has no {', '.join(missing)}"
    here = _shapes(optimizer)
    if "parameter_shapes" not in saved:  # by 0.1, which took optimizers alone whose state has their parameters' shapes
        return "" if own_form else _other_state(state["state"], here)
    there = saved["parameter_shapes"]
    if len(here) != len(there):
        return f"{len(there)} parameters there, {len(here)} here"
    odd = next((index for index, (a, b) in enumerate(zip(here, there, strict=True)) if a != b), None)
    return f"parameter {odd} is {there[odd]} there, {here[odd]} here" if odd is not None else ""


def _other_state(state: Mapping[int, Mapping[str, Any]], shapes: list[list[int]]) -> str:
    """Why a state by parameter does not fit parameters of these shapes, or empty."""
    for index, shape in enumerate(shapes):
        for name, value in state.get(index, {}).items():
            if isinstance(value, Tensor) and value.dim() and list(value.shape) != shape:
                return f"{name} of parameter {index} is {list(value.shape)} there, {shape} here"
    return ""
