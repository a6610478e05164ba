"""What a session and a plug hand out: settings, counts, files, state, averages. See `integrations.contract`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

Scalar = Tensor | float
State = TypeVar("State", bound="RunState")


class Config(Protocol):
    """The settings in force: fields of `plugins.AccelConfig`, with its values."""

    @property
    def accumulate(self) -> int | str: ...
    @property
    def batchnorm(self) -> str: ...
    @property
    def buckets(self) -> Any: ...
    @property
    def checkpointing(self) -> str: ...
    @property
    def clip_norm(self) -> float | str: ...
    @property
    def compile(self) -> str: ...
    @property
    def effective_batch(self) -> int | str: ...
    @property
    def ema(self) -> float | str: ...
    @property
    def lr_scale(self) -> str: ...
    @property
    def nonfinite(self) -> str: ...
    @property
    def normalise(self) -> str: ...
    @property
    def plan(self) -> Path | str: ...
    @property
    def recompile_budget(self) -> int: ...
    @property
    def seed(self) -> int | str: ...
    @property
    def validate_(self) -> str: ...
    def given(self) -> dict[str, Any]:
        """The fields that were given, apart from the defaults."""


class Start(Protocol):
    """What a run begins with. What the settings leave open is measured later."""

    @property
    def precision(self) -> str:
        """`host`, `fp32`, `bf16` or `fp16`."""

    @property
    def memory_format(self) -> str:
        """`host` or `channels_last`."""

    @property
    def in_fp16(self) -> bool:
        """Whether it runs in fp16, now or later: gradients then need a scaler."""


class Trial(Protocol):
    """What may be tried and switched on the batch at hand; `integrations.precision_layout.Layout` is one."""

    @property
    def host_precision(self) -> str:
        """`fp32`, `bf16` or `fp16`: that of the host's own autocast."""

    def loss(self) -> Tensor:
        """Run forward and loss on the batch at hand, in the autocast in force; returns the loss."""

    def apply(self, precision: str, memory_format: str) -> None:
        """Switch to this precision and memory format from here on; values as in `Start`."""

    def bare(self) -> AbstractContextManager[None]:
        """Inside, the model is without what was put on it, so that it can be pickled."""


class Outcome(Protocol):
    """What one closed window came to."""

    @property
    def stepped(self) -> bool:
        """False for a skipped update: the gradient is not finite."""

    @property
    def norm(self) -> float:
        """L2 norm of the exact gradient, before clipping."""

    @property
    def clipped(self) -> bool:
        """Whether the norm is finite and above the limit in force."""

    @property
    def partial(self) -> bool:
        """Of fewer micro-batches than expected."""


class Window(Protocol):
    """The micro-batches since the last update."""

    @property
    def empty(self) -> bool:
        """Whether no micro-batch has entered it so far."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches that have entered it so far."""

    @property
    def expected(self) -> int:
        """Micro-batches that this window will hold."""

    @property
    def weighted(self) -> bool:
        """Whether losses need a weight: a window of one micro-batch on one rank is the big batch itself."""

    def announce(self, total: Scalar, ranks: int = 1) -> None:
        """Tell the window's total count over all ranks before its first micro-batch, where the host knows it."""


class Files(Protocol):
    """`plugins.core.checkpoint`: atomic writes, extra state beside a checkpoint, random state."""

    @property
    def AtomicPath(self) -> Any:
        """A `Path` whose writes replace the file whole, or not at all."""

    def sweep(self, folder: Path) -> Any:
        """Remove what killed writes have left."""

    def write_atomically(self, target: Path, write: Callable[[Any], Any]) -> Any:
        """Write a file by `write(file)` so that it is the old one or the new one at every instant."""

    def save_sidecar(self, checkpoint: Path, data: Any, state: Mapping[str, Any]) -> Path:
        """Write the extra state that belongs to a checkpoint about to hold the bytes `data`; returns its path."""

    def load_sidecar(self, checkpoint: Path) -> dict[str, Any] | None:
        """The extra state that belongs to this very checkpoint, or None."""

    def drop_sidecars(self, checkpoint: Path, keep: Path | None = None) -> None:
        """Remove the extra state of earlier writes of this checkpoint, apart from `keep`."""

    def read_plain(self, path: Path) -> Any:
        """Plain values and tensors of a file that may be a stranger's.

        Raises:
            ValueError: it cannot be read, in a few words that do not name it.
        """

    def copy_by_name(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Put whole values, which every rank has, into live tensors, sharded ones among them."""

    def seed_everything(self, seed: int) -> None:
        """Seed Python's, NumPy's and torch's generators."""

    def random_state(self) -> dict[str, Any]:
        """The state of all generators, as values that `weights_only` loading allows."""

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `random_state` gave."""


class RunState(Protocol):
    """The state of a run by fields: `model`, `optimizer`, `scaler`, `average`, `window`, `random` ..."""

    def without(self: State, *fields: str) -> State:
        """The state without fields that a host's own checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, which `weights_only` loading allows."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` holds of these fields, random state excepted: see `Files.set_random_state`."""


class Average(Protocol):
    """Moved after every update that happened; resumed where it has `state_dict` and `load_state_dict`."""

    def update(self) -> None:
        """Move the average towards the weights as they are now."""


class WeightAverage(Average, Protocol):
    """The core's own moving average of the weights, for a host that has none."""

    @property
    def decay(self) -> float:
        """In (0, 1): the share that the average keeps of itself, once its ramp is over."""

    @property
    def updates(self) -> int:
        """How often the average has moved."""

    def swapped(self) -> AbstractContextManager[None]:
        """Inside, the model holds the averaged weights."""

    def unswapped(self) -> AbstractContextManager[None]:
        """Inside, the model holds the live weights, also inside `swapped`."""

    def live(self) -> dict[str, Tensor]:
        """The live weights by name, whole: all ranks of a sharded model call it."""

    def adopt(self) -> None:
        """The averaged weights become the model's own."""

    def wider(self) -> dict[str, Tensor]:
        """The averages that the model's own dtype would round, by name, whole."""

    def resume(self, live: Mapping[str, Tensor], updates: int, wider: Mapping[str, Tensor]) -> None:
        """The model holds averaged weights: take them as the average, but for `wider`; put `live` into the model."""

    def state_dict(self) -> dict[str, Any]:
        """The count of updates, and the averaged tensors by name."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
