"""Bucket edges that pad least, and the deal of samples to batches."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.shared.bucketing import choose_edges, deal, edge_for, round_up


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


@pytest.mark.parametrize(("length", "multiple", "rounded"), [(0, 8, 8), (8, 8, 8), (9, 8, 16), (5, 1, 5)])
def test_round_up_is_the_next_multiple_and_at_least_one(length: int, multiple: int, rounded: int) -> None:
    assert round_up(length, multiple) == rounded


def test_choose_edges_with_little_room_ends_at_the_longest_length() -> None:
    assert choose_edges([3, 50], 2, 8, room=50) == [8, 50]
    assert choose_edges([3, 50], 2, 8, room=64) == [8, 56]


def test_choose_edges_of_a_group_takes_no_edge_that_no_whole_batch_reaches() -> None:
    assert choose_edges([1, 2, 3, 90], 4, group=4) == [90]
    assert choose_edges([1, 2, 3, 3, 90], 4, group=4) == [3, 90]


def test_deal_promotes_what_fills_no_batch_and_draws_buckets_in_turn() -> None:
    drawn = []

    def buckets():
        for bucket in ([1, 2, 3], [4], [5, 6, 7]):
            drawn.append(bucket[0])
            yield bucket

    assert deal(buckets(), 2) == ([(0, [1, 2]), (1, [3, 4]), (2, [5, 6])], [7])
    assert drawn == [1, 4, 5]
