"""The blocks that a model is made of: what repeats, and what of it can run as one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Piece:
    """Modules that run one after the other.

    Attributes:
        owner: the module whose call holds them: themselves where it is one, else a Sequential.
        parts: the modules.
        start: the position of the first among the owner's children.
    """

    owner: nn.Module
    parts: tuple[nn.Module, ...]
    start: int = 0


def pieces(model: nn.Module) -> list[Piece]:
    """A model's parts, such that most of its layers lie in one of them and none is most of the model.

    The members of a ModuleList, Sequential or ModuleDict that have parts of their own (the layers of an encoder, the
    blocks of a detector); of a Sequential's plain layers, each layer of weights with what follows it; and `regions`.
    """
    found = list(_pieces(model, _leaves(model)))
    inside = {id(m) for piece in found for part in piece.parts for m in part.modules()}
    blocks = (region for region in regions(model) if any(region.children()))
    others = [block for block in blocks if not any(id(m) in inside for m in block.modules())]
    return [p for p in (*found, *(Piece(r, (r,)) for r in others)) if not _in_place(p.parts[0])]


def _pieces(module: nn.Module, whole: int) -> Iterator[Piece]:
    held = isinstance(module, CONTAINERS)
    if type(module).forward is nn.Sequential.forward:
        yield from _runs(module)
    for child in module.children():
        inner = list(_pieces(child, whole)) if _leaves(child) > 1 else []
        if not held or isinstance(child, CONTAINERS) or (len(inner) > 1 and 2 * _leaves(child) > whole):
            yield from inner
        elif any(child.children()):
            yield Piece(child, (child,))


def _runs(sequential: nn.Module) -> Iterator[Piece]:
    """Of a Sequential's plain layers: one with a matrix of weights, and those without that follow it."""
    run: list[nn.Module] = []
    start = 0
    for position, child in enumerate((*sequential._modules.values(), None)):
        weighs = child is None or any(p.ndim > 1 for p in child.parameters())
        composite = child is not None and any(child.children())
        if weighs or composite:
            if len(run) > 1:
                yield Piece(sequential, tuple(run), start)
            run, start = [], position
        if child is not None and not composite and (weighs or run):
            run.append(child)


def _leaves(module: nn.Module) -> int:
    return sum(1 for m in module.modules() if not any(m.children()))


def _in_place(module: nn.Module) -> bool:
    """Whether its first layer changes its input: a second run would begin with another one."""
    first = next(m for m in module.modules() if not any(m.children()))
    return bool(getattr(first, "inplace", False))


def regions(model: nn.Module, least: int = 2) -> list[nn.Module]:
    """The repeated blocks of a model: `least` or more modules under one parent that look alike.

    Alike is the same class and the same parameter shapes. A child that differs from the others (the first block of
    a T5, which alone has the position bias) stays eager. Members of a ModuleList, Sequential or ModuleDict come first.
    Attributes of another module (`self.block1`, `self.block2`) are blocks where they have parts of their own, unlike
    the Linears of an attention, and neither hold a block nor lie in one.
    """
    members = [child for m in model.modules() if isinstance(m, CONTAINERS) for child in _alike(m.children(), least)]
    blocks = _outermost(members)
    known = {id(m) for block in blocks for m in block.modules()}
    attributes = [
        child
        for m in model.modules()
        if not isinstance(m, CONTAINERS)
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
    leaves = [_leaves(part) for part in (model, *blocks)]
    return 2 * sum(leaves[1:]) >= leaves[0]
