from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.core.compile.dynamic_shapes import Marker, choose_edges, edge_for


def padding(lengths: list[int], edges: list[int]) -> int:
    return sum(edge_for(n, edges) - n for n in lengths)


def least_padding(lengths: list[int], most: int) -> int:
    """Every set of at most `most` edges among the lengths, the largest always in it."""
    values = sorted(set(lengths))
    rest, top = values[:-1], values[-1]
    sets = [[*c, top] for k in range(min(most, len(values))) for c in combinations(rest, k)]
    return min(padding(lengths, edges) for edges in sets)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=14), most=st.integers(1, 5))
def test_edges_are_the_best_there_are(lengths: list[int], most: int) -> None:
    edges = choose_edges(lengths, most)
    assert 1 <= len(edges) <= most
    assert edges == sorted(set(edges))
    assert edges[-1] == max(lengths)
    assert padding(lengths, edges) == least_padding(lengths, most)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=10),
    most=st.integers(1, 4),
    multiple=st.sampled_from([8, 32]),
)
def test_edges_of_a_multiple(lengths: list[int], most: int, multiple: int) -> None:
    edges = choose_edges(lengths, most, multiple)
    rounded = [-(-n // multiple) * multiple for n in lengths]
    assert all(edge % multiple == 0 for edge in edges)
    assert edges[-1] >= max(lengths)
    assert padding(rounded, edges) == least_padding(rounded, most)


def test_many_distinct_lengths_are_thinned_and_nothing_is_longer_than_the_last_edge() -> None:
    lengths = [(n * 7919) % 5000 + 1 for n in range(5000)]
    edges = choose_edges(lengths, 8)
    assert len(edges) == 8
    assert edges[-1] == max(lengths)
    assert padding(lengths, edges) / sum(lengths) < 0.13  # eight even edges of uniform lengths: 1 / 8


def test_no_lengths_no_edges() -> None:
    assert choose_edges([]) == []


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 60))
def test_edge_for_is_the_smallest_that_holds(edges: list[int], length: int) -> None:
    found = edge_for(length, edges)
    holding = [edge for edge in edges if edge >= length]
    assert found == (min(holding) if holding else max(edges))


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
