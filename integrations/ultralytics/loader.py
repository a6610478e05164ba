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
        "generator": generator.get_state() if generator is not None else None,
        "buffer": [int(i) for i in getattr(loader.dataset, "buffer", ())],
    }


def restore(loader: Any, state: dict[str, Any]) -> None:
    """Bring a fresh loader to where `position` was taken, also when the host resets it once more before use."""
    _refill(loader.dataset, state["buffer"])
    if state["generator"] is None or loader.num_workers > 0:
        return  # workers draw ahead and from generators of their own: equal in distribution, not bit for bit
    _prime(loader, state["generator"])
    reset = loader.reset

    def reset_and_prime() -> None:
        """An epoch that closes the mosaic resets the loader: right once, but not again on every resume."""
        reset()
        _prime(loader, state["generator"])

    loader.reset = reset_and_prime


def _prime(loader: Any, generator: torch.Tensor) -> None:
    """Create the iterator (which draws a seed) and only then set the generator: the straight run made it long ago."""
    loader.iterator = loader._get_iterator()
    loader.generator.set_state(generator)
    samples = len(loader.sampler)
    if samples % loader.batch_size == 0 and isinstance(loader.sampler, torch.utils.data.RandomSampler):
        # After a full last batch torch's RandomSampler has one draw pending, for the empty rest of its epoch.
        torch.randperm(samples, generator=loader.generator)


def _refill(dataset: Any, indices: list[int]) -> None:
    if not hasattr(dataset, "buffer"):
        return
    dataset.buffer.clear()
    for index in indices:
        dataset.load_image(index)
