"""Which modules of a model are compiled: the whole, its repeated blocks, or those of some names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from plugins.config import AccelConfig
from plugins.core.compile.compiled_module import CompileRefused
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


def regions(model: nn.Module, least: int = 2) -> list[nn.Module]:
    """The repeated blocks of a model: `least` or more modules under one parent that look alike.

    Alike is the same class and the same parameter shapes. A child that differs from the others (the first block of
    a T5, which alone has the position bias) stays eager. Members of a ModuleList, Sequential or ModuleDict come first.
    Attributes of another module (`self.block1`, `self.block2`) are blocks where they have parts of their own, unlike
    the Linears of an attention, and neither hold a block nor lie in one.
    """
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    members = [child for m in model.modules() if isinstance(m, containers) for child in _alike(m.children(), least)]
    blocks = _outermost(members)
    known = {id(m) for block in blocks for m in block.modules()}
    attributes = [
        child
        for m in model.modules()
        if not isinstance(m, containers)
        for child in _alike((c for c in m.children() if any(c.children())), least)
        if not any(id(inner) in known for inner in child.modules())
    ]
    found = {id(block) for block in (*blocks, *_outermost(attributes))}
    return [module for module in model.modules() if id(module) in found]


def _alike(children: Iterable[nn.Module], least: int) -> list[nn.Module]:
    groups: dict[Any, list[nn.Module]] = {}
    for child in children:
        if shapes := tuple(tuple(p.shape) for p in child.parameters()):
            groups.setdefault((type(child), shapes), []).append(child)
    return [child for group in groups.values() if len(group) >= least for child in group]


def _outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(m) for block in blocks for m in block.modules() if m is not block}
    return [block for block in blocks if id(block) not in inner]


def covers(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether these blocks are at least half of the model, counted in leaf modules."""
    leaves = [sum(1 for m in part.modules() if not list(m.children())) for part in (model, *blocks)]
    return 2 * sum(leaves[1:]) >= leaves[0]


def matching(model: nn.Module, patterns: list[str], exclude: list[str]) -> list[nn.Module]:
    """Modules whose name matches one of `patterns` (fnmatch) and none of `exclude`."""
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatch.fnmatch(name, p) for p in patterns) and not any(fnmatch.fnmatch(name, p) for p in exclude)
    ]
