"""Buckets of an iterable training set, found from the samples that the host's own reading gives first."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from integrations.huggingface.bucketing import find_edges
from integrations.huggingface.collator import BucketCollator
from integrations.huggingface.forked_process import in_a_copy
from integrations.huggingface.lengths import length_of, own_labels, survey
from integrations.huggingface.padding import own_length, telling_batches

PATIENCE = 10.0
"""Seconds that a look at a user's collator may take."""


class FirstSamples:
    """Chooses edges from a stream's first samples, and tells its collator; a worker does so for itself.

    Args:
        collator: of the stream's loader.
        buckets: "auto" or edges in tokens.
        limit: the most edges that are found.
        group: samples of a step over all ranks; `size` of them a batch.
        room: tokens that the model has positions for.
    """

    def __init__(
        self, collator: BucketCollator, buckets: str | Sequence[int], limit: int, group: int, size: int, room: int
    ) -> None:
        self.collator, self.buckets, self.limit = collator, buckets, limit
        self.group, self.size, self.room = group, size, room

    def __call__(self, samples: list[Any]) -> list[int]:
        """Find the edges (tokens) from the first samples; none where the collator pads by a rule of its own."""
        collator, names = self.collator, self.collator.label_names
        found = survey(samples, collator.key, names, budget=float("inf"))
        if found is None or self._pads_by_itself(samples, found.lengths, [collator.key, *own_labels(found, names)]):
            return []
        collator.forms = found.forms
        if not isinstance(self.buckets, str):
            collator.edges = sorted(int(edge) for edge in self.buckets)
        elif len(set(found.lengths)) > 1:
            collator.edges = find_edges(found.lengths, self.group, self.limit, self.room)
        return collator.edges

    def _pads_by_itself(self, samples: list[Any], lengths: Sequence[int], names: Sequence[str]) -> bool:
        batches = [[samples[index] for index in batch] for batch in telling_batches(lengths, self.size)]
        try:
            own = in_a_copy(lambda: own_length(self.collator.collate, batches, names), PATIENCE)
        except Exception:  # the user's code; the host meets it where it draws these samples
            own = True
        if own:
            logging.getLogger(__name__).warning("accel: buckets: the collator pads by a rule of its own, which stays")
        return own


def tokens(key: str, sample: Any) -> int:
    """Length of a sample, in tokens; 0 where it has none."""
    return length_of(sample, key) or 0


def can_be_read_anew(dataset: Any) -> bool:
    """True for a stream that begins anew when it is iterated again, by its library's word.

    Any other iterable may go on where it was left, or be fed by a queue that waits for the training's next step.
    """
    try:
        import datasets
    except ImportError:
        return False
    return isinstance(dataset, datasets.IterableDataset)


def usable(args: Any, group: int) -> int:
    """Samples that a run of `max_steps` updates can use."""
    steps = args.max_steps * args.gradient_accumulation_steps
    return steps * group if steps > 0 else sys.maxsize
