from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from plugins.core.compile.dynamic_shapes import Marker
from tests.core.compile.compiled import Counting, compiled


class Widths(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * x.shape[1]


class Specialises(nn.Module):
    """Has another form at width 6: a strict mark of the width cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.shape[1] == 6 else x.mean(1)


def test_a_strict_mark_is_one_graph_for_all_widths() -> None:
    backend = Counting()
    with compiled(Widths(), backend=backend, marker=Marker([1])) as (part, told):
        for width in (4, 7, 5, 9, 12):
            x = torch.randn(2, width)
            assert torch.equal(part.module(x), Widths()(x))
        assert part.marker.way == "strict"
    assert backend.graphs == 1
    assert told == []


def test_a_mark_that_cannot_hold_becomes_a_wish(capfd: pytest.CaptureFixture[str]) -> None:
    with compiled(Specialises(), marker=Marker([1])) as (part, told):
        for width in (6, 4, 5, 6, 7):
            x = torch.randn(2, width)
            assert torch.equal(part.module(x), Specialises()(x))
        assert part.active
        assert part.marker.way == "maybe"
    assert told == []
    assert "ConstraintViolation" not in capfd.readouterr().err


def test_where_no_mark_holds_there_is_one_static_graph_a_size() -> None:
    refused: list[str] = []
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if len(refused) < 2:
            refused.append(str(inputs))
            raise ConstraintViolationError("specialized it to be a constant (4)")
        graphs.append([i for i in inputs if isinstance(i, (int, torch.SymInt))])
        return graph.forward

    with compiled(Widths(), backend=backend, marker=Marker([1])) as (part, told):
        for width in (4, 7, 4, 5, 7):
            x = torch.randn(2, width)
            assert torch.equal(part.module(x), Widths()(x))
        assert part.marker.way == "static"
        assert part.active
    assert told == []
    assert graphs == [[], [], []]  # three sizes, none of them symbolic
