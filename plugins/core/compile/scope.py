"""Which modules of a model are compiled: the whole, its repeated blocks, or those of some names."""

from __future__ import annotations

import fnmatch

from torch import nn

from plugins.config import AccelConfig
from plugins.core.compile.compiled_module import CompileRefused
from plugins.core.step.blocks import covers, regions
from plugins.core.system.sharding import holds_shards


def modules_of(model: nn.Module, config: AccelConfig, scope: str = "") -> tuple[list[nn.Module], str]:
    """What to compile, and its name in the report: by the settings, or a plan's `scope`.

    `compile=auto` leaves `compile_scope=auto` to the model: its repeated blocks where they are most of it. So does any
    model that is sharded over ranks: gathering the weights of a block ends a graph, and the whole would be in pieces.

    Raises:
        CompileRefused
    """
    wanted: str | list[str] = config.compile_scope
    exclude = config.compile_exclude
    if isinstance(wanted, list):
        found = matching(model, wanted, exclude)
        if not found:
            raise CompileRefused(f"compile_scope={','.join(wanted)}: no module has such a name")
        return found, "features"
    blocks = _blocks(model, exclude)
    if wanted == "auto" and (config.compile != "on" or holds_shards(model)):
        wanted = "regional" if blocks and (exclude or covers(model, blocks)) else "whole"
    wanted = scope or wanted
    if wanted == "features":
        raise CompileRefused("a plan that compiles features needs compile_scope=NAME PATTERNS")
    if wanted == "regional":
        if not blocks:
            raise CompileRefused("compile_scope=regional: the model has no repeated blocks; use whole")
        return blocks, "regional"
    if exclude:
        raise CompileRefused(
            f"compile_exclude={','.join(exclude)}: the whole forward is one graph; "
            "use compile_scope=regional or name patterns"
        )
    return [model], "whole"


def _blocks(model: nn.Module, exclude: list[str]) -> list[nn.Module]:
    left_out = {id(m) for m in matching(model, exclude, [])}
    return [block for block in regions(model) if id(block) not in left_out]


def matching(model: nn.Module, patterns: list[str], exclude: list[str]) -> list[nn.Module]:
    """Modules whose name matches one of `patterns` (fnmatch) and none of `exclude`."""
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatch.fnmatch(name, p) for p in patterns) and not any(fnmatch.fnmatch(name, p) for p in exclude)
    ]
