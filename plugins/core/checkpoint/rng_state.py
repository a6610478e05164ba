"""The state of every random generator of this process, as plain values and tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugins.core.system import devices


def random_state() -> dict[str, Any]:
    """Python's, NumPy's, torch's and the accelerators' generators, as values that `weights_only` loading allows."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": devices.random_states(),  # its name since the first release; of whatever accelerator
    }
    try:
        import numpy
    except ImportError:
        return state
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state["numpy"] = [kind, torch.from_numpy(numpy.asarray(keys).astype("int64")), position, has_gauss, cached]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave, in every generator that is here."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"].cpu())
    devices.set_random_states(state["cuda"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))


@dataclass(frozen=True)
class Generators:
    """The same state in its generators' own forms, for the memory of this process only: cheap to take."""

    python: Any
    torch: Tensor
    accelerators: list[Tensor]
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """As it is now."""
        numpy = sys.modules.get("numpy")  # one that nobody has imported draws nothing
        state = numpy.random.get_state() if numpy is not None else None
        return cls(random.getstate(), torch.get_rng_state(), devices.random_states(), state)

    def put_back(self) -> None:
        """Every generator draws again what it drew from here on."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        devices.set_random_states(self.accelerators)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def seed_everything(seed: int) -> None:
    """All generators of this process; loader workers derive theirs from torch's."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy

        numpy.random.seed(seed % 2**32)
    except ImportError:
        pass
