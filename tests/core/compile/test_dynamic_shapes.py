from __future__ import annotations

from typing import Any

import torch

from plugins.core.compile.dynamic_shapes import Marker


def marks(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if "dynamo" in name}


def test_marks_are_put_on_nested_arguments_and_taken_off_again() -> None:
    inside, outside = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    marker = Marker([2])
    marker.mark([{"x": inside}], other=outside)
    assert 2 in marks(inside)["_dynamo_dynamic_indices"]
    assert marks(outside) == {}
    Marker.clear([{"x": inside}], other=outside)
    assert marks(inside) == {}


def test_size_one_is_never_marked() -> None:
    tensor = torch.zeros(2, 1)
    Marker([1]).mark(tensor)
    assert marks(tensor) == {}


def test_the_ways_in_their_order() -> None:
    marker = Marker([0])
    ways = [marker.way]
    while marker.relax():
        ways.append(marker.way)
    assert ways == ["strict", "maybe", "static"]
    tensor = torch.zeros(3)
    marker.mark(tensor)
    assert marks(tensor) == {}
    assert Marker().way == "static"
    assert not Marker().relax()
