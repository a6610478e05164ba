"""Where a training loader stands: what has to be kept so that a resumed run draws the same images.

On the CPU the host loads in the main process, so that the augmentations draw from the process's own generators.
Besides those, three things carry over from epoch to epoch: the sampler's generator, whether a draw of its last epoch
is still pending, and the mosaic buffer (indices of images lately loaded). A loader of the user's own need have none of
them; one that makes an iterator an epoch goes on from where its generators stood.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ultralytics.data.build import InfiniteDataLoader


def seed(loader: Any, number: int) -> None:
    """The loader's own generator, where it has one."""
    if getattr(loader, "generator", None) is not None:
        loader.generator.manual_seed(number)


def position(loader: Any) -> dict[str, Any]:
    """The loader's state at the end of an epoch, loadable with `weights_only=True`."""
    return {
        "samples": len(loader.dataset),
        "generator": _state(loader),
        "sampler": _state(getattr(loader, "sampler", None)),
        "buffer": _mosaic_buffer(loader.dataset),
    }


def restore(loader: Any, state: dict[str, Any], mosaic_closed: bool) -> bool:
    """Bring a fresh loader to where `position` was taken; False where the data set is another one now.

    The straight run goes on with the iterator that it made long ago, unless the host closes the mosaic now, which
    begins a new one. A host that resumes closes it in any case: `mosaic_closed` says that the straight run did before.
    """
    if state["samples"] != len(loader.dataset):
        return False
    _refill(loader.dataset, state["buffer"])

    def put_generators() -> None:
        _put(loader, state["generator"])
        _put(getattr(loader, "sampler", None), state.get("sampler"))

    if not isinstance(loader, InfiniteDataLoader):
        put_generators()
        return True
    if loader.num_workers > 0:
        return True  # workers draw ahead and from generators of their own: equal in distribution, not bit for bit
    begins_anew = False
    live: Any = loader
    reset, make_iterator = live.reset, live._get_iterator

    def note_reset() -> None:
        nonlocal begins_anew
        begins_anew = not mosaic_closed
        reset()  # an older host makes the iterator here

    def first_iterator() -> Any:
        del loader.reset, loader._get_iterator
        if begins_anew:
            put_generators()
            return make_iterator()
        now = torch.get_rng_state()
        iterator = make_iterator()  # draws a seed, as the straight run's did when it was made
        torch.set_rng_state(now)  # a loader without a generator draws from torch's
        put_generators()
        _pending_draw(loader)
        return iterator

    def batches() -> Iterator[Any]:
        live.iterator = live._get_iterator()
        yield next(live.iterator)

    live.reset, live._get_iterator = note_reset, first_iterator
    live.iterator = batches()  # an older host makes one with the loader, before there is anything to restore
    return True


class ScaleDraw:
    """One multi-scale draw a window, as one big batch would have; the generator goes on as it would have."""

    def __init__(self) -> None:
        self._before: Any = None  # Python's generator before the window's draw

    def preprocess(self, inner: Callable[[Any], dict[str, Any]], batch: Any, first: bool) -> dict[str, Any]:
        """`inner(batch)`, which draws a scale: a new one where the batch is the `first` of its window."""
        if first or self._before is None:
            self._before = random.getstate()
            return inner(batch)
        now = random.getstate()
        random.setstate(self._before)
        try:
            return inner(batch)
        finally:
            random.setstate(now)

    def state(self) -> Any:
        """As plain values."""
        return self._before and [self._before[0], list(self._before[1]), self._before[2]]

    def load(self, state: Any) -> None:
        """Put back what `state` gave."""
        self._before = state and (state[0], tuple(state[1]), state[2])


def _state(owner: Any) -> Any:
    """Of a loader's or sampler's own generator, where it has one."""
    generator = getattr(owner, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def _put(owner: Any, state: Any) -> None:
    if state is not None and isinstance(getattr(owner, "generator", None), torch.Generator):
        owner.generator.set_state(state)


def _pending_draw(loader: Any) -> None:
    """After a full last batch torch's RandomSampler has one draw pending, for the empty rest of its epoch.

    One without a generator of its own makes one an epoch, which ends with it.
    """
    sampler = loader.sampler
    if len(sampler) % loader.batch_size or not isinstance(sampler, torch.utils.data.RandomSampler):
        return
    if sampler.generator is not None:
        torch.randperm(len(sampler), generator=sampler.generator)


def _mosaic_buffer(dataset: Any) -> list[int]:
    """Of the host's own data sets; a user's attribute of that name may hold anything."""
    return [int(i) for i in dataset.buffer] if _has_buffer(dataset) else []


def _has_buffer(dataset: Any) -> bool:
    return hasattr(dataset, "load_image") and all(isinstance(i, int) for i in getattr(dataset, "buffer", (None,)))


def _refill(dataset: Any, indices: list[int]) -> None:
    if not _has_buffer(dataset):
        return
    dataset.buffer.clear()
    for index in indices:
        dataset.load_image(index)
