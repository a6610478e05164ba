"""Width buckets and the order of lines; part of the case 923."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.easyocr.bucketing import WidthBatches
from integrations.shared.bucketing import choose_edges


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(20, 900), min_size=1, max_size=150), st.integers(1, 16), st.integers(0, 3))
def test_every_line_once_an_epoch_in_bounded_shapes(widths, batch_size, number):
    edges = choose_edges(widths, 6, 16)
    batches = WidthBatches(widths, edges, batch_size, seed=3).epoch(number)
    assert Counter(i for batch in batches for i in batch.indices) == Counter(range(len(widths)))
    assert all(max(widths[i] for i in batch.indices) <= batch.width for batch in batches)
    assert {batch.width for batch in batches} <= set(edges)
    assert len(edges) <= 6
    assert sum(len(batch.indices) < batch_size for batch in batches) <= 1


def test_the_order_depends_on_seed_and_epoch_alone_and_resumes_anywhere():
    widths = np.random.default_rng(0).integers(40, 400, 101).tolist()
    make = lambda seed: WidthBatches(widths, [100, 200, 400], 8, seed=seed)  # noqa: E731
    straight = list(islice(make(1).from_position(0), 60))
    for position in (1, 13, 14, 40):
        assert list(islice(make(1).from_position(position), 60 - position)) == straight[position:]
    assert [b.epoch for b in straight] == sorted(b.epoch for b in straight)
    assert straight[-1].epoch >= 3
    assert list(islice(make(2).from_position(0), 60)) != straight


def test_buckets_save_padding():
    widths = np.random.default_rng(0).lognormal(np.log(150), 0.4, 2000).astype(int).tolist()
    one = WidthBatches(widths, [max(600, *widths)], 32).padding_fraction()
    six = WidthBatches(widths, choose_edges(widths, 6, 16), 32).padding_fraction()
    assert one > 0.6
    assert six < 0.2


def test_data_sets_share_an_epoch_by_their_ratios():
    batches = WidthBatches([100] * 400, [100], 10, sizes=[300, 100], shares=[0.25, 0.75], seed=1)
    drawn = [i for batch in islice(batches.from_position(0), 80) for i in batch.indices]
    small = [i for i in drawn if i >= 300]
    assert abs(len(small) / len(drawn) - 0.75) < 0.01
    counts = Counter(small)
    assert max(counts.values()) - min(counts.values()) <= 1  # its own endless shuffle, no line favoured


def test_total_data_usage_ratio_uses_a_fixed_part():
    batches = WidthBatches([100] * 40, [100], 5, usage=0.5)
    assert {i for batch in batches.epoch(0) + batches.epoch(1) for i in batch.indices} == set(range(20))
