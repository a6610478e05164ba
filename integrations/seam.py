"""The seam: the few neutral hooks that a host's adapter calls and the session answers.

The host drives. An adapter translates the host's own events into these calls, in this order:

    model_ready
    for every micro-batch:  micro_batch -> mean | batch_mean (the loss's weight) -> backward_done
    at a forced end of a window:  close
    around validation:  validation()
    around a checkpoint:  state_dict / load_state_dict, files
    at the end, on errors too:  end

`plugins.core.session.Session` is the one implementation; adapters see only this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class UnsupportedRun(ValueError):
    """A host's own setting or state that the plug refuses; the message is one line that names it."""


class Outcome(Protocol):
    """What one closed window came to."""

    stepped: bool
    norm: float
    clipped: bool
    partial: bool


class Seam(Protocol):
    """See the module's text for the order of calls."""

    config: Any
    report: Any
    files: Any  # plugins.core.checkpoint: atomic writes, digests, random state
    window: Any
    updates: int

    def model_ready(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        micro_batch: int,
        size: int | None,
        clip_norm: float | None = None,
        scaler: Any = None,
        average: Any = None,
        groups: Mapping[str, Iterable[nn.Parameter]] | None = None,
        schedule: Callable[[int], None] | None = None,
        dims: Iterable[int] = (),
        takes: Callable[[tuple[Any, ...]], bool] = ...,
        sync: bool = False,
    ) -> None:
        """Everything is built: model on its device, optimizer, EMA. `size` is K, or None where the host closes."""

    def micro_batch(self, shape: Iterable[int], expected: int | None = None) -> None:
        """A micro-batch is about to enter the model; `expected` micro-batches a window where the host decides."""

    def mean(self, count: Tensor | float, group: str = "") -> Tensor | float:
        """The weight of a loss that is a mean over `count` targets."""

    def batch_mean(self, images: int, targets: Tensor | float, group: str = "") -> Tensor | float:
        """The weight of a loss that is `images * N / max(targets, 1)`."""

    def backward_done(self, samples: int) -> Outcome | None:
        """Backward has run. Closes the window when it is full, and then says what it came to."""

    def close(self) -> Outcome | None:
        """Close a window that is not full (tail of the training); None when it is empty."""

    def validation(self) -> AbstractContextManager[None]:
        """Validation runs inside: its compiles and its time are not training's."""

    def state_dict(self) -> dict[str, Any]:
        """Live weights, optimizer, scaler, window with its gradients, EMA, random state, counts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, random state excepted: see `files.set_random_state`."""

    def warn(self, text: str) -> None:
        """Tell the user once, and keep it in the report."""

    def approximate(self, term: str) -> None:
        """Name a term of the loss that accumulation cannot make exact."""

    def end(self, folder: Path | None) -> None:
        """Undo everything that was put on the model, and write the report into `folder`."""
