"""The seam: the few neutral hooks that a host's adapter calls and the session answers.

The host drives. An adapter translates the host's own events into these calls, in this order:

    start_plan -> model_ready
    for every micro-batch:  micro_batch -> mean | batch_mean (the loss's weight) -> backward_done
    at a window's first, before its forward:  plan_window
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

from integrations.refusal import UnsupportedRun as UnsupportedRun


class Outcome(Protocol):
    """What one closed window came to."""

    stepped: bool
    norm: float
    clipped: bool
    partial: bool


class SessionContract(Protocol):
    """See the module's text for the order of calls."""

    @property
    def config(self) -> Any: ...

    @property
    def report(self) -> Any: ...

    @property
    def window(self) -> Any: ...

    @property
    def files(self) -> Any:
        """`plugins.core.checkpoint`: atomic writes, extra state beside a checkpoint, random state."""

    @property
    def updates(self) -> int:
        """Windows closed so far, skipped updates included: the index of the next update."""

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
        uncompilable: str = "",
        expected: int = 1,
    ) -> None:
        """Everything is built: model on its device, optimizer, EMA. `size` is K, or None where the host closes."""

    def start_plan(self, device: torch.device) -> tuple[str, str]:
        """Precision and memory format to begin with, before `model_ready`; what is left open is measured later."""

    def plan_window(self, trial: Any, left: int, shape: Iterable[int]) -> None:
        """At a window's first micro-batch, outside autocast: let the planner try or switch on the batch at hand.

        `trial.loss()` runs forward and loss on it, `trial.apply(precision, memory_format)` switches, inside
        `trial.bare()` the model can be pickled, `trial.host_precision` is that of the host's own autocast; `left`
        counts the micro-batches still to come, this one included.
        """

    def micro_batch(self, samples: int, expected: int | None = None) -> None:
        """A micro-batch has arrived from the loader; `expected` micro-batches a window where the host decides."""

    def shape(self, shape: Iterable[int], padding: int = 0) -> None:
        """The model's input is of this shape, `padding` elements of it padding."""

    def mean(self, count: Tensor | float, group: str = "") -> Tensor | float:
        """The weight of a loss that is a mean over `count` targets."""

    def batch_mean(self, images: int, targets: Tensor | float, group: str = "") -> Tensor | float:
        """The weight of a loss that is `images * N / max(targets, 1)`."""

    def share(self, group: str = "") -> Tensor | float:
        """The weight of a term that accumulation cannot make exact, so that it keeps its host's own size."""

    def backward_done(self) -> Outcome | None:
        """Backward has run. Closes the window when it is full, and then says what it came to."""

    def close(self) -> Outcome | None:
        """Close a window now: the host's rule says so, or training ends; None when it is empty."""

    def use(self, optimizer: torch.optim.Optimizer, scaler: Any, clip_norm: float | None) -> None:
        """Optimizer, scaler and the host's own clipping from now on: others may stand there than at `model_ready`."""

    def prepare(self) -> Outcome:
        """For a host that steps by itself: everything of an update up to the step. After the step comes `closed`."""

    def closed(self, outcome: Any) -> None:
        """The host has stepped by itself."""

    def drop(self) -> None:
        """Forget an unfinished window: the host threw its gradients away, or it came after the last save."""

    def idle(self) -> None:
        """The step is over; what follows until the next `micro_batch` is waiting for data."""

    def training_mode(self) -> None:
        """The host has set training mode: hold the BatchNorm rule."""

    def compile_validation(self, model: nn.Module) -> None:
        """Compile the model that validation runs, where `validate=compiled` asks for it."""

    def validation(self) -> AbstractContextManager[None]:
        """Validation runs inside: its compiles and its time are not training's."""

    def run_state(self) -> Any:
        """The run's state by fields: `run_state().without("model", ...)` leaves out what a host's own file holds."""

    def state_dict(self) -> dict[str, Any]:
        """Live weights, optimizer, scaler, window with its gradients, EMA, random state, counts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, random state excepted: see `files.set_random_state`."""

    def warn(self, text: str) -> None:
        """Tell the user once, and keep it in the report."""

    def approximate(self, term: str) -> None:
        """Name a term of the loss that accumulation cannot make exact."""

    def describe_window(self, micro_batch: int) -> None:
        """Tell the report the sizes in force, again after a host changed its batch."""

    def end(self, folder: Path | None = None) -> Path | None:
        """Undo everything that was put on the model, and write the report into `folder`."""
