"""A trial of a hand-written loop: its loader at another micro-batch, and its files in the trial's folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from plugins.errors import AccelError
from plugins.trial_run.request import current


def folder(given: str | Path | None) -> Path | None:
    """Where a run's report goes: the trial's own folder, where this process is a trial."""
    request = current()
    if request is not None and given is not None:
        return request.run_folder
    return Path(given) if given is not None else None


def file(given: str | Path) -> Path:
    """Where a checkpoint goes: into the trial's own folder, where this process is a trial."""
    request = current()
    return Path(given) if request is None else request.run_folder / Path(given).name


def micro_batch(given: int | None) -> int | None:
    """Samples a micro-batch: those of the trial, where it asks for some."""
    request = current()
    return given if request is None or request.micro_batch is None else request.micro_batch


def loader(given: Iterable[Any]) -> Iterable[Any]:
    """The same loader, or one like it with the trial's micro-batch.

    Raises:
        AccelError: a loader whose batches cannot be of another size.
    """
    request = current()
    if request is None or request.micro_batch is None or getattr(given, "batch_size", None) == request.micro_batch:
        return given
    if not isinstance(given, DataLoader) or type(given.batch_sampler) is not BatchSampler:
        raise AccelError(
            f"micro_batch={request.micro_batch}: the batches of {type(given).__name__} cannot be of another size; a "
            "trial needs a torch DataLoader with batch_size, given to accel.batches or to Lightning's fit"
        )
    changed = copy.copy(given)  # sampler, generator, collator and workers stay the user's own
    sampler = BatchSampler(given.sampler, request.micro_batch, given.drop_last)
    changed.__dict__.update(batch_sampler=sampler, batch_size=request.micro_batch)
    return changed
