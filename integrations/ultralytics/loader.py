"""Where a training loader stands: what has to be kept so that a resumed run draws the same images.

On the CPU the host loads in the main process, so that the augmentations draw from the process's own generators.
Besides those, three things carry over from epoch to epoch: the sampler's generator, whether a draw of its last epoch
is still pending, and the mosaic buffer (indices of images lately loaded).
"""

from __future__ import annotations

from typing import Any

import torch


def position(loader: Any) -> dict[str, Any]:
    """The loader's state at the end of an epoch, loadable with `weights_only=True`."""
    generator = getattr(loader, "generator", None)
    return {
        "samples": len(loader.dataset),
        "generator": generator.get_state() if generator is not None else None,
        "buffer": [int(i) for i in getattr(loader.dataset, "buffer", ())],
    }


def restore(loader: Any, state: dict[str, Any], mosaic_closed: bool) -> bool:
    """Bring a fresh loader to where `position` was taken; False where the data set is another one now.

    The straight run goes on with the iterator that it made long ago, unless the host closes the mosaic now, which
    begins a new one. A host that resumes closes it in any case: `mosaic_closed` says that the straight run did before.
    """
    if state["samples"] != len(loader.dataset):
        return False
    _refill(loader.dataset, state["buffer"])
    if state["generator"] is None or loader.num_workers > 0:
        return True  # workers draw ahead and from generators of their own: equal in distribution, not bit for bit
    begins_anew = False
    reset, make_iterator = loader.reset, loader._get_iterator

    def note_reset() -> None:
        nonlocal begins_anew
        reset()
        begins_anew = not mosaic_closed

    def first_iterator() -> Any:
        del loader.reset, loader._get_iterator
        if begins_anew:
            loader.generator.set_state(state["generator"])
            return make_iterator()
        iterator = make_iterator()  # draws a seed, as the straight run's did when it was made
        loader.generator.set_state(state["generator"])
        _pending_draw(loader)
        return iterator

    loader.reset, loader._get_iterator = note_reset, first_iterator
    return True


def _pending_draw(loader: Any) -> None:
    """After a full last batch torch's RandomSampler has one draw pending, for the empty rest of its epoch."""
    samples = len(loader.sampler)
    if samples % loader.batch_size == 0 and isinstance(loader.sampler, torch.utils.data.RandomSampler):
        torch.randperm(samples, generator=loader.generator)


def _refill(dataset: Any, indices: list[int]) -> None:
    if not hasattr(dataset, "buffer"):
        return
    dataset.buffer.clear()
    for index in indices:
        dataset.load_image(index)
