"""What this torch has and others lack, asked of torch itself: the one place that knows its releases apart.

Every row of `TABLE` names what is looked for, the first release seen to have it, and what is done without it; the
functions below are what is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import CompilationMetrics

LIMITS = ("Dynamo recompile limit exceeded", "cache_size_limit reached", "recompile_limit reached")
"""How the releases begin the reason of a frame that they stop compiling."""


@dataclass(frozen=True)
class Symbol:
    """Something that not every torch has.

    Attributes:
        name: what is looked for.
        since: the first release seen to have it.
        without: what is done where it is missing.
        here: whether this torch has it.
    """

    name: str
    since: str
    without: str
    here: bool


_parameters = inspect.signature(torch.compile).parameters
_fields = vars(CompilationMetrics).get("__dataclass_fields__", {})

RECOMPILE_LIMIT = Symbol(
    "torch.compile(recompile_limit)",
    "2.14",
    "the limit of graphs is torch's setting for the process, and holds during our calls",
    "recompile_limit" in _parameters,
)
ISOLATION = Symbol(
    "torch.compile(isolate_recompiles)",
    "2.14",
    "models of one class share one count of graphs, so recompile_budget may be reached sooner",
    "isolate_recompiles" in _parameters,
)
BACKWARD_AUTOCAST = Symbol(
    "torch._functorch.config.backward_pass_autocast",
    "2.14",
    "a compiled backward runs as torch alone runs it",
    hasattr(functorch_config, "backward_pass_autocast"),
)
BACKWARD_AT_ONCE = Symbol(
    "torch._functorch.config.force_non_lazy_backward_lowering",
    "2.14",
    "an error of the compiler in a backward ends the run instead of its compile: set compile=off there",
    hasattr(functorch_config, "force_non_lazy_backward_lowering"),
)
REASONS = Symbol(
    "torch._dynamo.utils.CompilationMetrics.recompile_reason",
    "2.14",
    "recompiles are counted, and their reasons are not in the report",
    "recompile_reason" in _fields,
)
SAVED_TENSORS = Symbol(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "2.14",
    "checkpointing=on checkpoints every block, without a choice by size; checkpointing=auto stays off",
    hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
)
TABLE = (RECOMPILE_LIMIT, ISOLATION, BACKWARD_AUTOCAST, BACKWARD_AT_ONCE, REASONS, SAVED_TENSORS)

_LIMIT_SETTING = "recompile_limit" if hasattr(dynamo_config, "recompile_limit") else "cache_size_limit"


def compiled(function: Callable[..., Any], limit: int, isolate: bool, **arguments: Any) -> Callable[..., Any]:
    """`torch.compile` of a function that may keep `limit` graphs, in a cache of its own where `isolate`."""
    if RECOMPILE_LIMIT.here:
        arguments["recompile_limit"] = limit
    if ISOLATION.here:
        arguments["isolate_recompiles"] = isolate
    found: Callable[..., Any] = torch.compile(_traced(function, isolate), **arguments)
    if RECOMPILE_LIMIT.here:
        return found

    def limited(*args: Any, **kwargs: Any) -> Any:
        with dynamo_config.patch({_LIMIT_SETTING: limit}):
            return found(*args, **kwargs)

    return limited


def _traced(function: Callable[..., Any], isolate: bool) -> Callable[..., Any]:
    """A module's call that torch traces: an older one skips frames of its own layers, and would run them eagerly."""
    module = getattr(function, "__self__", None)
    skipped = isinstance(module, torch.nn.Module) and trace_rules.check(module.forward)
    if not skipped or ISOLATION.here:
        return function
    found: Any = wrap_inline(function)
    if isolate:  # graphs are counted by code, which all such wrappers share
        found.__code__ = found.__code__.replace()
    return found  # type: ignore[no-any-return]


def backward_settings() -> AbstractContextManager[Any]:
    """During a lazy compile: the backward outside autocast, and lowered at once so that its errors come here."""
    wanted = {"backward_pass_autocast": "off", "force_non_lazy_backward_lowering": True}
    there = {name: value for name, value in wanted.items() if hasattr(functorch_config, name)}
    return functorch_config.patch(there) if there else nullcontext()


def noting_saved(note: Callable[[Tensor], None]) -> AbstractContextManager[Any]:
    """Inside, tensors that autograd keeps for the backward are noted; what is done with them stays as it was."""
    if not SAVED_TENSORS.here:
        return nullcontext()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = hooks if hooks is not None else (lambda tensor: tensor, lambda tensor: tensor)

    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(noted, unpack)


def recompile_reason(row: Any) -> str:
    """Why a compile (a row of torch's metrics) was not the first of its frame; empty where it was."""
    if REASONS.here:
        return str(row.recompile_reason or "")
    again = str(row.compile_id).rpartition("/")[2] != "0" and row.fail_type is None
    return "this torch keeps no reasons" if again else ""


def reached_limit(row: Any) -> bool:
    """Whether torch stopped compiling a frame at its limit of graphs."""
    return any(words in str(row.fail_reason or "") for words in LIMITS)
