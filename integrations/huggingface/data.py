"""Bucketed loaders for a Trainer: the same samples, updates and schedule, with few lengths and little padding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.utils import gather_object
from torch.utils.data import DataLoader, IterableDataset

from integrations.huggingface import versions
from integrations.huggingface.bucket_sampler import BucketBatchSampler, loader_options, no_second_sharding
from integrations.huggingface.bucketing import expected_tokens, find_edges, padded_tokens, with_overflow
from integrations.huggingface.collator import BucketCollator, BucketedStream, PlacedDataset
from integrations.huggingface.forked_process import in_a_copy
from integrations.huggingface.lengths import (
    Form,
    Survey,
    is_hf_dataset,
    length_key,
    room,
)
from integrations.huggingface.padding import covers_padding, look_at, takes_mask, unknown
from integrations.huggingface.stream_bucketing import PATIENCE, FirstSamples, can_be_read_anew, tokens, usable

WORTH = 0.95
"""buckets=auto: only where they leave at most this part of the tokens that shuffled batches would cost."""


class Loaders:
    """Builds the trainer's loaders with buckets, or leaves them to the host.

    Args:
        trainer: the host's.
        buckets: "auto", "off" or edges in tokens.
        limit: the most edges that are found from data.
        say: shows a line to the user.
        compiled: evaluation is compiled, so its lengths have to be few at "auto" too.
    """

    def __init__(
        self,
        trainer: Any,
        buckets: str | Sequence[int],
        limit: int,
        say: Callable[[str], None],
        compiled: bool = False,
    ) -> None:
        self.trainer, self.buckets, self.limit, self.say = trainer, buckets, min(limit, 8), say
        self.compiled = compiled
        self._edges: list[int] = []
        self.padding: tuple[int, int] | None = None  # padded tokens that hold nothing, and all tokens, of an epoch
        # the dataset and the collator are kept, so their ids stay their own
        self._surveys: dict[tuple[int, ...], tuple[Any, Survey | None, str]] = {}
        self._evaluations: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()
        self._sampler: BucketBatchSampler | None = None
        self._stream: BucketedStream | None = None

    @property
    def edges(self) -> list[int]:
        """Of the training batches, in tokens; a stream's are known once it is read."""
        return self._edges or (self._stream.edges if self._stream is not None else [])

    @property
    def builds(self) -> bool:
        """Whether the latest training loader has, or may find, buckets."""
        return bool(self._edges) or self._stream is not None

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
        if is_training:
            self._edges, self._sampler, self._stream = [], None, None
        if self.buckets == "off" or dataset is None or self._user_samples(is_training):
            return leave()
        if args.world_size > 1 and args.accelerator_config.split_batches:
            return leave()  # a batch is then cut over ranks by the host
        if isinstance(dataset, IterableDataset):
            return self._streamed(leave, dataset, description, batch_size) if is_training else leave()
        if is_training:
            grouped = self._grouped(dataset, description, batch_size, is_training=True)
            return leave() if grouped is None else grouped
        loader = leave()
        if self._can_be_reordered() and isinstance(loader, DataLoader):
            self._evaluations[loader] = partial(self._grouped, dataset, description, batch_size, is_training=False)
        return loader

    def for_evaluation(self, loader: Any) -> Any:
        """The bucketed twin of an evaluation loader, for the host's own loop only, which puts the order back.

        Whoever asks the trainer for a loader gets the data in its own order.
        """
        build = self._evaluations.get(loader) if isinstance(loader, DataLoader) else None
        if build is None:
            return loader
        grouped = build()
        if grouped is None:
            return loader
        if self.trainer.args.dataloader_persistent_workers:
            # its workers go on living, so the next evaluation must find them
            self._evaluations[loader] = lambda: grouped
        return grouped

    def _grouped(self, dataset: Any, description: str, batch_size: int, is_training: bool) -> Any:
        """A loader of one bucket a batch; None where that is not possible, or not worth it."""
        key = length_key(self.trainer.processing_class, self.trainer.model)
        parts = partial(self._host_parts, dataset, description)
        look = partial(look_at, dataset, parts, key, self._label_names(), batch_size)
        found = self._survey(look, dataset, together=not is_training or self.trainer.is_in_train)
        if found is None:
            return None
        group = batch_size * self.trainer.args.world_size
        edges = self._edges_for(found.lengths, group, is_training)
        if edges is None or not self._may_pad(found.against, found.forms):
            return None
        sampler = self._sampler_for(found, edges, batch_size, is_training)
        dataset, collate = self._host_parts(dataset, description)
        # predictions are as wide as the widest batch, which is the host's where nothing is gained by more
        pads = is_training or self.compiled or self.buckets != "auto"
        placed = PlacedDataset(dataset)
        if not is_training:
            placed.order = sampler.order
        loader = self._prepare(
            DataLoader(
                placed,
                batch_sampler=sampler,
                collate_fn=self._collator(collate, edges if pads else [], key, found.forms),
                **loader_options(self.trainer.args, is_training),
            )
        )
        if is_training:
            self._sampler, self._edges = sampler, edges
            padded = padded_tokens(found.lengths, edges, group)
            self.padding = (padded - sum(found.lengths), padded)
            no_second_sharding(loader)
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
        chosen = versions.chosen_order(trainer.args) if is_training else ""
        if (own or chosen) and self.buckets != "auto":
            what = chosen or f"{type(trainer).__name__}.{name}"
            self.say(f"buckets={self.buckets}: {what} orders the samples; leave one of the two out. Buckets are off")
        return own or bool(chosen)

    def _edges_for(self, lengths: list[int], group: int, is_training: bool) -> list[int] | None:
        longest = max(lengths)
        if self.buckets != "auto":
            given = [int(edge) for edge in self.buckets]
            edges = with_overflow(given, longest, self._room())
            if len(edges) > len(given):
                self.say(
                    f"buckets={given}: the longest sample has {longest} tokens, so an edge of {edges[-1]} was added"
                )
            return edges
        if not is_training and self.edges:
            return with_overflow(self.edges, longest, self._room())
        edges = find_edges(lengths, group, self.limit, self._room())
        size = group // self.trainer.args.world_size
        plain = expected_tokens(lengths, size) if len(set(lengths)) > 1 else 0
        return edges if padded_tokens(lengths, edges, group) <= WORTH * plain else None

    def _can_be_reordered(self) -> bool:
        """Predictions must come back in the data's own order, which needs them all, and in one piece."""
        args = self.trainer.args
        return bool(args.eval_do_concat_batches) and not args.batch_eval_metrics and not args.dataloader_drop_last

    def _may_pad(self, why: str = "", names: Collection[str] = ()) -> bool:
        """Padding that a model or its loss reads changes its result; a user's own choice of length stays."""
        model = self.trainer.model
        if takes_mask(model) is False:
            why = f"{type(model).__name__} takes no attention_mask"
        elif covers_padding(model, names):
            why = f"the loss of {type(model).__name__} covers padded positions"
        elif not why and self.buckets == "auto" and (own := unknown(self.trainer)):
            why = f"{own}, and may read padding"
        if why:
            self._leave(why)
        return not why

    def _leave(self, why: str) -> None:
        self.say(f"buckets={self.buckets}: {why}; batches stay as the host makes them")

    def _survey(self, look: Callable[[], Survey | None], dataset: Any, together: bool) -> Survey | None:
        """What is known of a dataset; `together` where all ranks ask at once, and so can agree."""
        collator = self.trainer.data_collator
        place = (id(dataset), len(dataset), id(collator))  # a dataset may grow between two runs
        if place not in self._surveys:
            found, why = None, ""
            try:
                found = in_a_copy(look, PATIENCE)
            except Exception as reason:
                why = str(reason)
            self._surveys[place] = ((dataset, collator), found, why)
        _, found, why = self._surveys[place]
        if together and self.trainer.args.world_size > 1:
            # one rank that read too slowly must not deal its samples in another way than the rest
            why = next(filter(None, gather_object([why])), "")
            against = next(filter(None, gather_object([found.against if found is not None else ""])), "")
            found = found._replace(against=against) if found is not None else None
        if why:
            self._leave(why)
        return None if why else found

    def _host_parts(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """The dataset and the collator that the host would give its loader."""
        trainer = self.trainer
        if is_hf_dataset(dataset):
            return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
        return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)

    def _label_names(self) -> list[str]:
        return list(getattr(self.trainer, "label_names", None) or [])

    # -- building ----------------------------------------------------------------------------------------------

    def _sampler_for(self, found: Survey, edges: list[int], batch_size: int, is_training: bool) -> BucketBatchSampler:
        args = self.trainer.args
        return BucketBatchSampler(
            found.lengths,
            edges,
            batch_size,
            ranks=args.world_size,
            rank=args.process_index if is_training else None,
            shuffle=is_training,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            label_lengths=found.label_lengths,
            room=self._room(),
        )

    def _tokenizer(self) -> Any:
        return self.trainer.processing_class or getattr(self.trainer.data_collator, "tokenizer", None)

    def _room(self) -> int:
        return room(self.trainer.model, self._tokenizer())

    def _collator(self, collate: Any, edges: list[int], key: str, forms: Mapping[str, Form]) -> BucketCollator:
        tokenizer = self._tokenizer()
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is None:
            pad = getattr(getattr(self.trainer.model, "config", None), "pad_token_id", None)
        return BucketCollator(
            collate,
            edges,
            forms=forms,
            label_names=self._label_names(),
            # a list of ids is a user's choice that cannot be padded with one id
            pad_token_id=pad if isinstance(pad, int) else 0,
            side=getattr(tokenizer, "padding_side", "right"),
            key=key,
            masked=takes_mask(self.trainer.model) is True,
            copies=type(self.trainer.data_collator).__module__.startswith("transformers."),
            room=self._room(),
        )

    def _streamed(self, leave: Callable[[], Any], dataset: Any, description: str, batch_size: int) -> Any:
        """Buckets over an iterable, which is read as the host reads it; `auto` only where it can be read anew."""
        args, auto = self.trainer.args, self.buckets == "auto"
        if auto and (not can_be_read_anew(dataset) or args.dataloader_num_workers > 1):
            return leave()
        if not self._may_pad():
            return leave()
        group, key = batch_size * args.world_size, length_key(self.trainer.processing_class, self.trainer.model)
        _, collate = self._host_parts(dataset, description)
        collator = self._collator(collate, [], key, {})
        choose = FirstSamples(collator, self.buckets, self.limit, group, batch_size, self._room())
        length = partial(tokens, key)
        self._stream = BucketedStream(dataset, [], group, length, choose=choose, most=usable(args, group))
        return self._prepare(
            DataLoader(self._stream, batch_size=batch_size, collate_fn=collator, **loader_options(args, False))
        )

    def _prepare(self, loader: DataLoader[Any]) -> Any:
        return self.trainer.accelerator.prepare(loader)
