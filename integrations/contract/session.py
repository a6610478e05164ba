"""What an adapter may use of the session of one run. See `integrations.contract` for the order of calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from integrations.contract.parts import Average, Config, Files, Outcome, RunState, Scalar, Window
from integrations.contract.report import Report
from integrations.contract.rescue import Rescue


class Session(Protocol):
    """One run, complete once it is built."""

    @property
    def config(self) -> Config:
        """The settings in force."""

    @property
    def report(self) -> Report:
        """What has happened so far, to be read and filled in."""

    @property
    def window(self) -> Window:
        """The micro-batches since the last update."""

    @property
    def rescue(self) -> Rescue:
        """What happens where memory runs out."""

    @property
    def files(self) -> Files:
        """Atomic writes, extra state, random state."""

    @property
    def model(self) -> nn.Module:
        """The bare module."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one in force, see `use`."""

    @property
    def scaler(self) -> Any:
        """The `torch.amp.GradScaler` in force, or None."""

    @property
    def average(self) -> Average | None:
        """What is moved after every update, or None."""

    @property
    def updates(self) -> int:
        """Windows closed so far, skipped updates included: the index of the next update."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients have to be zeroed in place now, as CUDA graphs need."""

    def parameters(self) -> list[nn.Parameter]:
        """All that the optimizer holds."""

    def beside_model(self) -> list[nn.Parameter]:
        """What the optimizer holds and the model does not (a criterion's weights)."""

    # -- micro-batches

    def micro_batch(self, samples: int, expected: int | None = None) -> None:
        """A micro-batch has come from the loader: `arrived` and `count`.

        Args:
            samples: in it.
            expected: micro-batches of this window, where the host decides.
        """

    def arrived(self, expected: int | None = None) -> None:
        """A micro-batch has come from the loader; `count` follows once it is sure that it has a backward."""

    def count(self, samples: int) -> None:
        """The micro-batch that came enters the window."""

    def shape(self, shape: Iterable[int], padding: int = 0) -> None:
        """The model's input is of this shape, `padding` elements of it padding."""

    def mean(self, count: Scalar, group: str = "") -> Scalar:
        """The weight of a loss that is a mean over `count` targets."""

    def batch_mean(self, images: int, targets: Scalar, group: str = "") -> Scalar:
        """The weight of a loss that is `images * N / max(targets, 1)`."""

    def share(self, group: str = "") -> Scalar:
        """The weight of a term that accumulation cannot make exact, so that it keeps its host's own size."""

    def loss(self, value: Tensor, weight: Scalar = 1.0) -> None:
        """The loss of the micro-batch at hand, for who looks at the run: 0-dim, a mean over `weight` targets."""

    def idle(self) -> None:
        """The micro-batch is over; what follows until the next is waiting for data."""

    def training_mode(self) -> None:
        """The host has set training mode: hold the BatchNorm rule."""

    # -- updates; see plugins/core/step/update.py

    def backward_done(self) -> Outcome | None:
        """Backward has run. Runs the update when the window is full, and then says what it came to."""

    def close(self) -> Outcome | None:
        """Run the update now: the host's rule says so, or training ends; None where the window is empty."""

    def join(self) -> Outcome | None:
        """As `close`, also with an empty window where other ranks have one; None where no rank has."""

    def prepare_update(self) -> Outcome:
        """For a host that steps by itself: everything of an update up to the step."""

    def engine_stepped(self, norm: float, stepped: bool) -> Outcome:
        """For a host whose engine has reduced, checked, clipped and stepped by itself; `finish_update` follows.

        Args:
            norm: L2 norm of the exact gradient before clipping, over all ranks.
            stepped: False where the engine has skipped the update.
        """

    def finish_update(self, outcome: Any, averaged: bool = False) -> None:
        """The host has stepped, or has skipped its step as `outcome` says.

        Args:
            outcome: of `prepare_update`.
            averaged: the host's step has moved the average itself.
        """

    def drop(self) -> None:
        """Forget an unfinished window: the host threw its gradients away, or it came after the last save."""

    def use(self, optimizer: torch.optim.Optimizer, scaler: Any, clip_norm: float | None) -> None:
        """Optimizer, scaler and the host's own clipping from now on: a callback may have exchanged them."""

    def resize(self, size: int | None, expected: int, micro_batch: int) -> None:
        """The host changed its batch: windows and samples from now on, as in `NewSession`."""

    def describe_window(self, micro_batch: int) -> None:
        """Tell the report the samples of a micro-batch, where they were not known at the start."""

    # -- what is measured

    @property
    def waits(self) -> bool:
        """Whether `plan_window` may still try or switch something."""

    @property
    def timing(self) -> bool:
        """Whether the run's own eager steps are timed now, and trials may follow."""

    @property
    def measured(self) -> bool:
        """Whether nothing is tried any more."""

    @property
    def may_compile(self) -> bool:
        """Whether compiled code runs, or may run later."""

    def plan_window(self, trial: Any, left: int, shape: Iterable[int]) -> None:
        """At a window's first micro-batch, outside autocast: let plans be tried or switched on the batch at hand.

        Args:
            trial: a `Trial`.
            left: micro-batches still to come, this one included.
            shape: of the input; empty where nothing can be tried.
        """

    def measure_nothing(self, why: str) -> None:
        """No trial from now on; `why` is for the report."""

    def open_plan(self, start: Any) -> None:
        """Begin with another `Start` than was said, before the first micro-batch."""

    def none_finite(self, count: int) -> bool:
        """Whether none of the last `count` updates had a finite gradient, and so many there were."""

    # -- validation, checkpoints, words, end

    def compile_validation(self, model: nn.Module) -> None:
        """Compile the model that validation runs, where `validate=compiled` asks for it."""

    def validation(self) -> AbstractContextManager[None]:
        """Validation runs inside: its compiles and its time are not training's."""

    def run_state(self) -> RunState:
        """What a resume needs, by fields."""

    def state_dict(self) -> dict[str, Any]:
        """All fields of `run_state`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, random state excepted."""

    def warn(self, text: str) -> None:
        """Tell the user once, and keep it in the report."""

    def approximate(self, term: str) -> None:
        """Name a term of the loss that accumulation cannot make exact."""

    def write_report(self, folder: Path) -> Path:
        """Write the report as it stands now; returns the path of its JSON."""

    def end(self, folder: Path | None = None) -> Path | None:
        """Undo everything that was put on the model, and write the report into `folder`. Safe to call twice."""
