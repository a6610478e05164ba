"""Windows, buckets and samplers as properties over samples, batch, K, epochs, ranks and the point of a resume."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from integrations.easyocr.bucketing import WidthBatches
from integrations.huggingface.bucket_sampler import BucketBatchSampler
from integrations.refusal import UnsupportedRun
from integrations.shared.batch_size import micro_batches_per_update
from integrations.shared.bucketing import choose_edges
from plugins import AccelConfig
from plugins.loop import Accelerated
from tests.trust.strategies import sizes, tried

LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=80)
SHAPE = st.tuples(LENGTHS, st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31), st.integers(1, 6))


@sizes(60, 1000)
def test_every_rank_has_as_many_batches_and_every_sample_comes_once_an_epoch(count: int) -> None:
    def check(drawn: tuple[list[int], int, int, int, int]) -> None:
        lengths, batch, ranks, seed, most = drawn
        edges = choose_edges(lengths, most, group=batch * ranks)
        assert edges == sorted(set(edges))
        assert len(edges) <= most
        assert edges[-1] >= max(lengths)
        made = [BucketBatchSampler(lengths, edges, batch, ranks=ranks, rank=rank, seed=seed) for rank in range(ranks)]
        for epoch in range(2):
            for sampler in made:
                sampler.set_epoch(epoch)
            taken = [list(sampler) for sampler in made]
            assert len({len(batches) for batches in taken}) == 1
            assert all(len(batches) == len(sampler) for batches, sampler in zip(taken, made, strict=True))
            seen = Counter(placed.sample for batches in taken for one in batches for placed in one)
            assert set(seen) == set(range(len(lengths)))
            assert seen.total() <= len(lengths) + ranks - 1  # a short last step borrows, so that no rank is without
            if ranks == 1:
                assert set(seen.values()) == {1}
            for batches in taken:
                for one in batches:
                    assert 1 <= len(one) <= batch
                    assert len({placed.edge for placed in one}) == 1
                    assert all(lengths[placed.sample] <= placed.edge for placed in one)
            assert taken == [list(sampler) for sampler in made]  # a resumed epoch is the same one

    tried(count, SHAPE, check)


@sizes(60, 1000)
def test_a_recognizer_s_order_is_every_line_once_an_epoch_and_goes_on_anywhere(count: int) -> None:
    def check(drawn: tuple[list[int], int, int, int, int]) -> None:
        widths, batch, ranks, seed, most = drawn
        made = WidthBatches(widths, choose_edges(widths, most, 8), batch, seed=seed)
        epoch = made.epoch(1)
        assert Counter(line for one in epoch for line in one.indices) == Counter(range(len(widths)))
        assert all(widths[line] <= one.width for one in epoch for line in one.indices)
        assert len(epoch) == math.ceil(len(widths) / batch)
        position = seed % (3 * len(epoch) + 1)
        whole = list(islice(made.from_position(0), position + 2 * ranks))
        again = WidthBatches(widths, choose_edges(widths, most, 8), batch, seed=seed)
        assert list(islice(again.from_position(position), 2 * ranks)) == whole[position:]
        mine = [list(islice(made.from_position(0), rank, 2 * ranks, ranks)) for rank in range(ranks)]
        assert [one for step in zip(*mine, strict=True) for one in step] == whole[: 2 * ranks] or len(whole) < 2 * ranks

    tried(count, SHAPE, check)


@sizes(200, 2000)
def test_an_effective_batch_is_that_many_samples_or_is_refused(count: int) -> None:
    def check(drawn: tuple[int, int]) -> None:
        wanted, step = drawn
        config = AccelConfig(effective_batch=wanted)
        try:
            found = micro_batches_per_update(config, step, host=1, named="samples")
        except UnsupportedRun:
            assert wanted % step
            return
        assert found * step == wanted

    tried(count, st.tuples(st.integers(1, 10**6), st.integers(1, 999)), check)


@sizes(8, 200)
def test_updates_and_windows_of_any_run_and_of_its_resume(count: int, tmp_path: Any) -> None:
    """A run of `epochs` times `batches` micro-batches, saved after any of them and resumed."""

    def trained(resume: bool, stop: int, accumulate: int, batches: list[torch.Tensor], epochs: int) -> Accelerated:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        accel = Accelerated(
            model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), accumulate=accumulate, plan="off",
            compile="off", precision="fp32", say=lambda line: None,
        )  # fmt: skip
        done = accel.resume(tmp_path / "last.pt")["done"] if resume else 0
        for position in range(done, len(batches) * epochs):
            accel.training_step(lambda x: model(x).square().mean(), batches[position % len(batches)])
            if (position + 1) % len(batches) == 0:
                accel.flush()
            if not resume and position + 1 == stop:
                accel.save(tmp_path / "last.pt", done=stop)
        accel.end()
        return accel

    def check(drawn: tuple[list[int], int, int, int]) -> None:
        samples, accumulate, epochs, at = drawn
        batches = [torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) for n in samples]
        stop = at % (len(batches) * epochs) + 1
        straight = trained(False, stop, accumulate, batches, epochs)
        resumed = trained(True, stop, accumulate, batches, epochs)
        assert straight.updates == epochs * math.ceil(len(batches) / accumulate)
        one, other = (asdict(run.session.report.window) for run in (straight, resumed))
        sizes_seen = ("micro_batch", "effective_batch")  # a run with nothing left to train has seen none
        assert {n: v for n, v in one.items() if n not in sizes_seen} == {
            n: v for n, v in other.items() if n not in sizes_seen
        }
        partial = epochs if len(batches) % accumulate else 0
        assert straight.session.report.window.partial_windows == partial
        for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    samples = st.lists(st.integers(1, 5), min_size=1, max_size=5)
    tried(count, st.tuples(samples, st.integers(1, 6), st.integers(1, 3), st.integers(0, 99)), check)
