"""A batch sampler that gives every step one bucket, on all ranks, and every sample once an epoch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import Sampler

from integrations.huggingface.bucketing import bucket_of, fitted
from integrations.shared.bucketing import deal

T = TypeVar("T")


class Placed(NamedTuple):
    """A sample and where it was put: what the sampler yields and `PlacedDataset` reads."""

    sample: int
    edge: int
    """Tokens that the inputs of the whole batch are padded to."""
    label_edge: int
    """Tokens that labels with a length of their own are padded to; 0 where there are none."""


class BucketBatchSampler(Sampler[list[Placed]]):
    """Batches of one bucket each.

    Buckets are dealt as `integrations.shared.bucketing` says. The last, short step is shared out so that no rank
    stays without a sample.

    Args:
        lengths: tokens of every sample.
        edges: rising bucket edges; the last one holds the longest sample.
        batch_size: samples of one rank and micro-batch.
        ranks: ranks that take a batch each in a step.
        rank: the rank whose batches are yielded, or None for the batches of all ranks, one after the other.
        shuffle: draw samples and the order of steps anew every epoch.
        seed: the order of an epoch depends on (seed, epoch) and on nothing else, so a resumed run sees it again.
        drop_last: leave out the short step.
        label_lengths: tokens of every sample's labels where these have a length of their own (seq2seq).
        room: tokens that the model has positions for.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        edges: Sequence[int],
        batch_size: int,
        *,
        ranks: int = 1,
        rank: int | None = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        label_lengths: Sequence[int] | None = None,
        room: int = sys.maxsize,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: allowed are integers of at least 1")
        if rank is not None and not 0 <= rank < ranks:
            raise ValueError(f"rank={rank}: allowed are 0 to {ranks - 1}")
        self.lengths, self.edges = list(lengths), sorted(set(edges))
        self.batch_size, self.ranks, self.rank = batch_size, ranks, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.label_edges = self._label_edges(label_lengths, room)
        self._buckets: list[list[int]] = [[] for _ in self.edges]
        for index, length in enumerate(self.lengths):
            self._buckets[bucket_of(length, self.edges)].append(index)

    def set_epoch(self, epoch: int) -> None:
        """The host calls this before it iterates."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, tail = divmod(len(self.lengths), self.batch_size * self.ranks)
        tail = 0 if self.drop_last else tail
        if self.rank is None:
            return full * self.ranks + -(-tail // self.batch_size)
        return full + bool(tail)

    def __iter__(self) -> Iterator[list[Placed]]:
        for step in self.steps():
            yield from step if self.rank is None else [step[self.rank]]

    def order(self) -> list[int]:
        """Indices of this epoch in the order in which they are visited, rank after rank within a step."""
        return [placed.sample for step in self.steps() for batch in step for placed in batch]

    def steps(self) -> list[list[list[Placed]]]:
        """All steps of this epoch: step -> rank -> batch."""
        group = self.batch_size * self.ranks
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)

        def shuffled(items: list[T]) -> list[T]:
            return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]

        order = shuffled if self.shuffle else list
        steps, waiting = deal((order(members) for members in self._buckets), group)
        steps = order(steps)
        if waiting and not self.drop_last:
            last = max(bucket for bucket, members in enumerate(self._buckets) if members)
            steps.append((last, waiting))
        return self._share(steps)

    def _share(self, steps: list[tuple[int, list[int]]]) -> list[list[list[Placed]]]:
        """Deal every step's samples to the ranks, in slices; the short step as evenly as it goes."""
        shared = []
        for bucket, members in steps:
            if self.rank is not None and len(members) < self.ranks:
                # No rank may stay without a sample: a step is a collective. The short step borrows samples from
                # its own front, as the host's own samplers do.
                members = [members[i % len(members)] for i in range(self.ranks)]
            size = self.batch_size
            cuts = [rank * size for rank in range(self.ranks + 1)]
            if len(members) < size * self.ranks and self.rank is not None:
                cuts = [len(members) * rank // self.ranks for rank in range(self.ranks + 1)]
            placed = [Placed(index, self.edges[bucket], self.label_edges[bucket]) for index in members]
            shared.append([placed[a:b] for a, b in pairwise(cuts)])
        return [[batch for batch in step if batch] for step in shared]

    def _label_edges(self, label_lengths: Sequence[int] | None, room: int) -> list[int]:
        """For every bucket the longest labels in it or in a shorter one, which may be promoted into it."""
        if label_lengths is None:
            return [0] * len(self.edges)
        longest = [0] * len(self.edges)
        for length, labels in zip(self.lengths, label_lengths, strict=True):
            bucket = bucket_of(length, self.edges)
            longest[bucket] = max(longest[bucket], fitted(labels, room))
        for bucket in range(1, len(longest)):
            longest[bucket] = max(longest[bucket], longest[bucket - 1])
        return longest


def loader_options(args: Any, is_training: bool) -> dict[str, Any]:
    """What the host gives its loaders besides data, sampler and collator; `is_training`: also its workers' seeds."""
    options = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory,
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        "in_order": getattr(args, "dataloader_in_order", True),
    }
    if is_training:
        from transformers.trainer_utils import seed_worker

        workers = args.dataloader_num_workers
        options["worker_init_fn"] = partial(seed_worker, num_workers=workers, rank=args.process_index)
    return options


def no_second_sharding(loader: Any) -> None:
    """The sampler gives each rank its own batches; accelerate's wrapper would share them out again."""
    shard = getattr(loader, "batch_sampler", None)
    if shard is not None and hasattr(shard, "num_processes"):
        shard.num_processes, shard.process_index = 1, 0
        shard.batch_size = None  # or it would fill a short batch up with samples that were seen
