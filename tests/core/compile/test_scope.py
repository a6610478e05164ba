from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from plugins.core.compile.compiled_module import CompiledModule
from plugins.core.compile.monitor import CompileMonitor
from plugins.core.compile.scope import matching
from plugins.core.step.blocks import regions
from tests.core.compile.compiled import Counting, X, compiled
from tests.core.tiny import mlp


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_regions_are_the_repeated_blocks_and_not_what_is_inside_them() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    model.one = nn.ModuleList([block()])
    model.uneven = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])
    assert regions(model) == list(model.blocks)
    assert regions(mlp()) == []


def test_regions_are_found_in_a_module_dict_and_as_attributes_but_plain_layers_are_no_blocks() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    class Attributes(nn.Module):
        def __init__(self, make: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.first, self.second, self.other = make(), make(), nn.Linear(4, 2)

    model = nn.Module()
    model.named = nn.ModuleDict({name: Attention() for name in "abc"})
    assert regions(model) == list(model.named.values())
    assert regions(Attention()) == []
    plain = Attributes(Attention)
    assert regions(plain) == [plain.first, plain.second]
    towers = Attributes(lambda: nn.Sequential(*[Attention() for _ in range(3)]))
    assert regions(towers) == [*towers.first, *towers.second]  # the smaller blocks, not the towers
    nested = Attributes(lambda: Attributes(Attention))
    assert regions(nested) == [nested.first, nested.second]


def test_identical_blocks_share_one_graph() -> None:
    model, backend = nn.Sequential(*[block() for _ in range(12)]), Counting()
    parts = [CompiledModule(b, backend=backend, isolate=False, limit=2) for b in regions(model)]
    assert len(parts) == 12
    for part in parts:
        part.install()
    x = torch.randn(2, 4)
    model(x)
    assert all(part.active for part in parts)
    assert backend.graphs <= 2


def test_twelve_different_modules_are_twelve_graphs_and_none_is_silently_eager() -> None:
    """They share one code object, whose limit is 8 graphs."""
    monitor, backend = CompileMonitor(), Counting()
    monitor.start()
    try:
        for width in range(1, 13):
            with compiled(nn.Linear(3, width), backend=backend) as (part, told):
                part.module(X)
                assert part.active
                assert told == []
        assert backend.graphs == monitor.graphs == 12
        assert monitor.fell_to_eager == []
    finally:
        monitor.end()


def test_names_that_match_and_those_that_are_excluded() -> None:
    model = mlp(norm=True)
    assert matching(model, ["first", "l*"], []) == [model.first, model.last]
    assert matching(model, ["*s*"], ["last"]) == [model.first]
    assert matching(model, ["no"], []) == []
