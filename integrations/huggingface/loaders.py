"""Bucketed loaders for a Trainer: the same samples, updates and schedule, with few lengths and little padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from integrations.huggingface.collator import BucketCollator, BucketedStream, PlacedDataset
from integrations.huggingface.edges import find_edges, padded_tokens, with_overflow
from integrations.huggingface.lengths import dataset_lengths, label_lengths, length_key, length_of, stream_lengths
from integrations.huggingface.sampler import BucketBatchSampler

WORTH = 0.95
"""buckets=auto: only where they leave at most this part of the tokens that shuffled batches would cost."""


class Loaders:
    """Builds the trainer's loaders with buckets, or leaves them to the host.

    Args:
        trainer: the host's.
        buckets: "auto", "off" or edges in tokens.
        limit: the most edges that are found from data.
        say: shows a line to the user.
    """

    def __init__(self, trainer: Any, buckets: str | Sequence[int], limit: int, say: Callable[[str], None]) -> None:
        self.trainer, self.buckets, self.limit, self.say = trainer, buckets, min(limit, 8), say
        self.edges: list[int] = []
        self.padding: tuple[int, int] | None = None  # padded tokens that hold nothing, and all tokens, of an epoch
        self._lengths: dict[
            int, tuple[Any, list[int] | None, list[int] | None]
        ] = {}  # the dataset is kept, so its id stays its own
        self._sampler: BucketBatchSampler | None = None

    def get_dataloader(
        self,
        original: Callable[..., Any],
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """The trainer's `_get_dataloader`."""
        leave = partial(original, dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        args = self.trainer.args
        if self.buckets == "off" or dataset is None or self._user_samples(is_training):
            return leave()
        if args.world_size > 1 and args.accelerator_config.split_batches:
            return leave()  # a batch is then cut over ranks by the host
        if isinstance(dataset, IterableDataset):
            return self._stream(leave, dataset, description, batch_size)
        key = length_key(self.trainer.processing_class, self.trainer.model)
        lengths = self._known_lengths(dataset, key)
        if lengths is None:
            return leave()
        group = batch_size * self.trainer.args.world_size
        edges = self._edges(lengths, group, is_training)
        if edges is None:
            return leave()
        grouped = is_training or self._can_be_reordered()
        sampler = self._sampler_for(dataset, lengths, edges, batch_size, is_training)
        collate: Any = self.trainer.data_collator
        if _is_hf_dataset(dataset):
            dataset = self.trainer._remove_unused_columns(dataset, description=description)
        else:
            collate = self.trainer._get_collator_with_removed_columns(collate, description=description)
        placed = PlacedDataset(dataset)
        if grouped and not is_training:
            placed.order = sampler.order
        batches = sampler if grouped else BatchSampler(SequentialSampler(lengths), batch_size, False)
        loader = self._prepare(
            DataLoader(
                placed,
                batch_sampler=batches,
                collate_fn=self._collator(collate, edges, key),
                **self._options(is_training),
            )
        )
        if dataloader_key is not None and args.dataloader_persistent_workers:
            # as the host does: its workers go on living, so the next evaluation must find them
            vars(self.trainer).setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        if is_training:
            self._sampler, self.edges = sampler, edges
            padded = padded_tokens(lengths, edges, group)
            self.padding = (padded - sum(lengths), padded)
            _no_second_sharding(loader)
        return loader

    def set_epoch(self, epoch: int) -> None:
        """The host reaches a sampler through several wrappers, of which not all pass the epoch on."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    # -- the decision ------------------------------------------------------------------------------------------

    def _user_samples(self, is_training: bool) -> bool:
        """True where the user chose an order of samples: a strategy of the host's or a sampler of their own."""
        from transformers import Trainer

        trainer = self.trainer
        name = "_get_train_sampler" if is_training else "_get_eval_sampler"
        own = getattr(type(trainer), name) is not getattr(Trainer, name)
        strategy = str(getattr(trainer.args, "train_sampling_strategy", "random"))
        chosen = is_training and strategy not in ("random", "SamplingStrategy.RANDOM")
        if (own or chosen) and self.buckets != "auto":
            what = f"train_sampling_strategy={strategy}" if chosen else f"{type(trainer).__name__}.{name}"
            self.say(f"buckets={self.buckets}: {what} orders the samples; leave one of the two out. Buckets are off")
        return own or chosen

    def _edges(self, lengths: list[int], group: int, is_training: bool) -> list[int] | None:
        longest = max(lengths)
        if self.buckets != "auto":
            given = [int(edge) for edge in self.buckets]
            edges = with_overflow(given, longest)
            if len(edges) > len(given):
                self.say(
                    f"buckets={given}: the longest sample has {longest} tokens, so an edge of {edges[-1]} was added"
                )
            return edges
        if not is_training and self.edges:
            return with_overflow(self.edges, longest)
        edges = find_edges(lengths, group, self.limit)
        size = group // self.trainer.args.world_size
        plain = _expected_tokens(lengths, size) if len(set(lengths)) > 1 else 0
        return edges if padded_tokens(lengths, edges, group) <= WORTH * plain else None

    def _can_be_reordered(self) -> bool:
        """Predictions must come back in the data's own order, which needs them all in one piece."""
        args = self.trainer.args
        return bool(args.eval_do_concat_batches) and not args.batch_eval_metrics

    def _known_lengths(self, dataset: Any, key: str) -> list[int] | None:
        if id(dataset) not in self._lengths:
            column = getattr(self.trainer.args, "length_column_name", "length")
            with _random_kept():
                try:
                    found = dataset_lengths(dataset, key, column)
                except (TypeError, NotImplementedError):
                    found = None
                labels = label_lengths(dataset, found) if found else None
            self._lengths[id(dataset)] = (dataset, found, labels)
        return self._lengths[id(dataset)][1]

    # -- building ----------------------------------------------------------------------------------------------

    def _sampler_for(
        self, dataset: Any, lengths: list[int], edges: list[int], batch_size: int, is_training: bool
    ) -> BucketBatchSampler:
        args = self.trainer.args
        return BucketBatchSampler(
            lengths,
            edges,
            batch_size,
            ranks=args.world_size,
            rank=args.process_index if is_training else None,
            shuffle=is_training,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            label_lengths=self._lengths[id(dataset)][2],
        )

    def _collator(self, collate: Any, edges: list[int], key: str) -> BucketCollator:
        tokenizer = self.trainer.processing_class or getattr(self.trainer.data_collator, "tokenizer", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is None:
            pad = getattr(getattr(self.trainer.model, "config", None), "pad_token_id", None)
        # a list of ids is a user's choice that cannot be padded with one id
        side = getattr(tokenizer, "padding_side", "right")
        return BucketCollator(collate, edges, pad_token_id=pad if isinstance(pad, int) else 0, side=side, key=key)

    def _stream(self, leave: Callable[[], Any], dataset: Any, description: str, batch_size: int) -> Any:
        key = length_key(self.trainer.processing_class, self.trainer.model)
        group = batch_size * self.trainer.args.world_size
        if isinstance(self.buckets, str):
            if _once(dataset):
                return leave()  # a stream that can be read only once must not be looked into
            lengths = stream_lengths(dataset, key)
            edges = find_edges(lengths, group, self.limit) if lengths and len(set(lengths)) > 1 else []
        else:
            edges = [int(edge) for edge in self.buckets]
        if not edges:
            return leave()
        self.edges = self.edges or edges
        stream = BucketedStream(dataset, edges, group, lambda sample: length_of(sample, key) or 0)
        collate = self.trainer._get_collator_with_removed_columns(self.trainer.data_collator, description=description)
        options = {k: v for k, v in self._options(False).items() if k != "worker_init_fn"}
        return self._prepare(
            DataLoader(stream, batch_size=batch_size, collate_fn=self._collator(collate, edges, key), **options)
        )

    def _options(self, is_training: bool) -> dict[str, Any]:
        args = self.trainer.args
        options = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if is_training:
            from transformers.trainer_utils import seed_worker

            workers = args.dataloader_num_workers
            options["worker_init_fn"] = partial(seed_worker, num_workers=workers, rank=args.process_index)
        return options

    def _prepare(self, loader: DataLoader[Any]) -> Any:
        return self.trainer.accelerator.prepare(loader)


@contextmanager
def _random_kept() -> Iterator[None]:
    """Looking at samples leaves no trace: a data set may draw random numbers for each (augmentation)."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _no_second_sharding(loader: Any) -> None:
    """The sampler gives each rank its own batches; accelerate's wrapper would share them out again."""
    shard = getattr(loader, "batch_sampler", None)
    if shard is not None and hasattr(shard, "num_processes"):
        shard.num_processes, shard.process_index = 1, 0
        shard.batch_size = None  # or it would fill a short batch up with samples that were seen


def _expected_tokens(lengths: Sequence[int], size: int) -> float:
    """Tokens that an epoch of shuffled batches of `size` costs when each is padded to its longest sample.

    With the lengths in order, the k-th smallest of n is the longest of a draw with probability
    (k/n)^size - ((k-1)/n)^size (draws with replacement).
    """
    n = len(lengths)
    return n * sum(x * ((k / n) ** size - ((k - 1) / n) ** size) for k, x in enumerate(sorted(lengths), start=1))


def _once(dataset: Any) -> bool:
    """True for an iterator, which gives its samples only once."""
    return iter(dataset) is dataset or hasattr(dataset, "__next__")


def _is_hf_dataset(dataset: Any) -> bool:
    try:
        import datasets
    except ImportError:
        return False
    return isinstance(dataset, datasets.Dataset)
