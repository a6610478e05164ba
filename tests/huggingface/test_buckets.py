"""The sampler and the collator: every sample once, one bucket a batch, the same on all ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.huggingface.bucket_sampler import BucketBatchSampler
from integrations.huggingface.bucketing import bucket_of, find_edges, padded_tokens, with_overflow
from integrations.huggingface.collator import BucketCollator, BucketedStream, Marked, PlacedDataset
from integrations.huggingface.lengths import Form


def collate(features):
    """Pads `input_ids` and `labels` to the longest sample."""
    longest = max(len(f["input_ids"]) for f in features)
    return {
        "input_ids": torch.tensor([f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]),
        "attention_mask": torch.tensor(
            [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features]
        ),
        "labels": torch.tensor([f["labels"] + [-100] * (longest - len(f["labels"])) for f in features]),
    }


ALONG, OWN = {"labels": Form.ALONG}, {"labels": Form.OWN}


def samples(lengths):
    return [{"input_ids": [index + 1] * length, "labels": [1] * length} for index, length in enumerate(lengths)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=90),
    batch=st.integers(1, 7),
    ranks=st.integers(1, 3),
    epoch=st.integers(0, 3),
    limit=st.integers(1, 8),
)
def test_every_sample_once_and_one_bucket_on_all_ranks(lengths, batch, ranks, epoch, limit):
    edges = find_edges(lengths, batch * ranks, limit)
    assert len(edges) <= limit
    assert edges[-1] >= max(lengths)
    per_rank = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(lengths, edges, batch, ranks=ranks, rank=rank, seed=3)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) == -(-len(lengths) // (batch * ranks))
        per_rank.append(batches)
    for step in zip(*per_rank, strict=True):
        assert len({placed.edge for placed_batch in step for placed in placed_batch}) == 1
        assert all(0 < len(placed_batch) <= batch for placed_batch in step)
    seen = Counter(placed.sample for batches in per_rank for placed_batch in batches for placed in placed_batch)
    assert set(seen) == set(range(len(lengths)))
    tail = len(lengths) % (batch * ranks)
    assert sum(seen.values()) - len(lengths) == (ranks - tail if 0 < tail < ranks else 0)
    for placed in (placed for batches in per_rank for placed_batch in batches for placed in placed_batch):
        assert lengths[placed.sample] <= placed.edge


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=60),
    group=st.integers(1, 9),
    limit=st.integers(1, 4),
)
def test_found_edges_cost_least_among_all_sets_of_edges(lengths, group, limit):
    from itertools import combinations

    candidates = sorted({-(-length // 8) * 8 for length in lengths})
    found = find_edges(lengths, group, limit)
    least = min(
        padded_tokens(lengths, [*rest, candidates[-1]], group)
        for size in range(limit)
        for rest in combinations(candidates[:-1], min(size, len(candidates) - 1))
    )
    assert padded_tokens(lengths, found, group) == least


def test_case_pytorch_188150_lengths():
    rng = random.Random(0)
    lengths = [rng.randint(1, 512) for _ in range(200)]
    data = PlacedDataset(samples(lengths))
    edges = [64, 128, 256, 512]
    loader = torch.utils.data.DataLoader(
        data,
        batch_sampler=BucketBatchSampler(lengths, edges, 8),
        collate_fn=BucketCollator(collate, edges, forms=ALONG),
    )
    shapes = Counter(tuple(batch["input_ids"].shape) for batch in loader)
    assert {shape[1] for shape in shapes} <= set(edges)
    assert sum(shape[0] != 8 for shape in shapes) == 0  # 200 is 25 x 8
    assert sum(count * shape[0] for shape, count in shapes.items()) == 200


def test_at_most_one_tail_shape():
    rng = random.Random(1)
    lengths = [rng.randint(1, 512) for _ in range(203)]
    batches = list(BucketBatchSampler(lengths, [64, 128, 256, 512], 8))
    assert [len(batch) for batch in batches if len(batch) != 8] == [3]
    assert len(batches[-1]) == 3


def test_reproducible_reshuffled_and_the_same_after_a_resume():
    lengths = [1 + i % 50 for i in range(101)]
    sampler = BucketBatchSampler(lengths, [16, 32, 56], 4, seed=7)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    again = BucketBatchSampler(lengths, [16, 32, 56], 4, seed=7)
    again.set_epoch(1)
    assert list(again) == epochs[1] != epochs[0]


def test_order_without_shuffle_is_the_order_of_visits():
    lengths = [5, 60, 7, 61, 9]
    sampler = BucketBatchSampler(lengths, [16, 64], 2, rank=None, ranks=1, shuffle=False)
    assert sampler.order() == [p.sample for batch in sampler for p in batch]
    assert sorted(sampler.order()) == [0, 1, 2, 3, 4]


def test_collator_pads_labels_too_and_keeps_content():
    data = samples([3, 5])
    batch = BucketCollator(collate, [8, 16], forms=ALONG)(data)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (2, 8)
    assert batch["labels"][0].tolist() == [1] * 3 + [-100] * 5
    assert batch["attention_mask"].sum() == 8
    assert batch["input_ids"][1].tolist() == [2] * 5 + [0] * 3


def test_collator_pads_on_the_left_where_the_tokenizer_does():
    batch = BucketCollator(collate, [8], forms=ALONG, side="left", pad_token_id=9)(samples([4, 4]))
    assert batch["input_ids"][0].tolist() == [9] * 4 + [1] * 4
    assert batch["labels"][0].tolist() == [-100] * 4 + [1] * 4


def test_collator_adds_a_mask_where_it_adds_padding():
    def bare(features):
        return {"input_ids": torch.tensor([f["input_ids"] for f in features])}

    batch = BucketCollator(bare, [8])(samples([5, 5]))
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3] * 2


def test_a_model_of_unknown_positions_gets_the_edges_and_nothing_beyond():
    collator = BucketCollator(collate, [8, 16], forms=ALONG, room=0)
    assert collator(samples([3, 5]))["labels"].shape == (2, 8)
    assert collator([Marked(sample, 32, 0) for sample in samples([17, 18])])["input_ids"].shape == (2, 18)


def test_seq2seq_labels_have_few_lengths():
    lengths, labels = [10, 12, 30, 31, 9, 28], [4, 9, 3, 17, 2, 5]
    data = [{"input_ids": [1] * a, "labels": [1] * b} for a, b in zip(lengths, labels, strict=True)]

    def pad(features):
        batch = collate([{**f, "labels": [1]} for f in features])
        longest = max(len(f["labels"]) for f in features)
        batch["labels"] = torch.tensor([f["labels"] + [-100] * (longest - len(f["labels"])) for f in features])
        return batch

    sampler = BucketBatchSampler(lengths, [16, 32], 2, label_lengths=labels)
    loader = torch.utils.data.DataLoader(
        PlacedDataset(data), batch_sampler=sampler, collate_fn=BucketCollator(pad, [16, 32], forms=OWN)
    )
    shapes = {(tuple(b["input_ids"].shape), tuple(b["labels"].shape)) for b in loader}
    assert shapes == {((2, 16), (2, 16)), ((2, 32), (2, 24))}


def test_what_has_the_labels_own_length_is_padded_with_them_or_not_at_all():
    def pair(name):
        def both(features):
            own = torch.ones(1, 3, dtype=torch.long)
            return {"input_ids": torch.full((1, 8), 5), "labels": own, name: own}

        return BucketCollator(both, [8], forms=OWN, pad_token_id=9)([{"input_ids": [5] * 8}])

    decoder, weights = pair("decoder_input_ids"), pair("weights")
    assert decoder["labels"].tolist() == [[1] * 3 + [-100] * 5]
    assert decoder["decoder_input_ids"].tolist() == [[1] * 3 + [9] * 5]
    assert weights["labels"].shape == weights["weights"].shape == (1, 3)


def test_stream_is_bounded_and_gives_runs_of_one_bucket():
    rng = random.Random(2)
    lengths = [rng.randint(1, 300) for _ in range(500)]
    taken = 0

    def source():
        nonlocal taken
        for sample in samples(lengths):
            taken += 1
            yield sample

    edges, group = [64, 128, 256], 8
    stream = BucketedStream(source(), edges, group, lambda s: len(s["input_ids"]))
    out = []
    for sample in stream:
        out.append(sample)
        assert taken - len(out) <= 4 * (group - 1) + group  # three edges and one overflow edge
    assert Counter(marked.sample["input_ids"][0] for marked in out) == Counter(range(1, 501))
    runs = [out[at : at + group] for at in range(0, len(out), group)]
    assert all(len({sample.edge for sample in run}) == 1 for run in runs)
    assert {sample.edge for sample in out} <= {64, 128, 256, 512}


def test_too_long_a_sample():
    assert with_overflow([64, 128], 100) == [64, 128]
    assert with_overflow([64, 128], 301) == [64, 128, 304]
    with pytest.raises(ValueError, match=r"buckets=\[64, 128\]: a sample has 301 tokens"):
        bucket_of(301, [64, 128])
