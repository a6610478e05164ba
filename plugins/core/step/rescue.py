"""Out of memory inside a window: its gradients are dropped, and it is done again with half the micro-batch.

The host's batches stay as they are, in their order; each is divided into pieces along its samples, and every piece has
its own forward and backward. The window closes where it would have closed, so that its samples, the schedule and the
loader's position stay the same, and its gradient is that of the same big batch. From then on every batch is divided.

Until the window closes its batches are held, as references only, with the random state that each began with.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from plugins.core.checkpoint.rng_state import Generators
from plugins.core.step.accumulation import Window
from plugins.core.step.batchnorm import Statistics
from plugins.core.system import devices, memory
from plugins.errors import AccelError

T = TypeVar("T")


class OutOfMemory(AccelError, torch.OutOfMemoryError):
    """Memory does not suffice, and the micro-batch cannot be made smaller. The weights are the last update's."""


class UpdateOutOfMemory(AccelError, torch.OutOfMemoryError):
    """Memory does not suffice for an update. Weights and the optimizer's state may be half an update ahead."""


TOLD = (OutOfMemory, UpdateOutOfMemory)  # in one line already, with what to do


class Run(Protocol):
    """What is asked and told of the run."""

    @property
    def window(self) -> Window:
        """The micro-batches since the last update."""

    @property
    def updates(self) -> int:
        """Windows closed so far."""

    def clear_gradients(self) -> None:
        """Drop, or zero where they have to stay, the gradients of all parameters."""

    def drop(self) -> None:
        """Forget the window."""

    def warn(self, text: str) -> None:
        """Tell the user once."""

    def sizes(self, micro_batches: int, micro_batch: int, effective_batch: int) -> None:
        """An update's micro-batches, the samples of one, and those of the update, from now on."""

    def out_of_memory(self, micro_batch: int) -> None:
        """Memory ran out in this update; micro-batches have so many samples since."""

    def forgive(self, seconds: float) -> None:
        """Time that is no step's."""


@dataclass(frozen=True)
class Step:
    """Forward and backward of one of the host's batches, as it can be done again.

    Attributes:
        run: does it, in pieces of at most `Rescue.limit` samples.
        samples: of the batch.
        cannot: why the batch cannot be divided, or empty.
        random: the generators as it began.
    """

    run: Callable[[], Any]
    samples: int
    cannot: Callable[[], str]
    random: Generators


class Rescue:
    """Of one run.

    Args:
        run: the run.
        statistics: BatchNorm's, which were kept as the window began.
        device: of the model.

    Attributes:
        limit: the most samples that a piece may have; None while nothing has to be divided.
    """

    def __init__(self, run: Run, statistics: Statistics, device: torch.device) -> None:
        self.run, self.statistics, self.device = run, statistics, device
        self.limit: int | None = None
        self._micro_batch = 0  # the host's
        self._steps: list[Step] = []
        self._all_noted = True  # the micro-batches of the window at hand
        self._again: Callable[[], None] = lambda: None
        self._keep: Callable[[], str] = lambda: ""
        self._begins_anew = False

    def held_by(
        self, again: Callable[[], None], keep: Callable[[], str] = lambda: "", begins_anew: bool = False
    ) -> None:
        """What a host has to do.

        Args:
            again: before the window is done again: forget what was summed up in it.
            keep: the run cannot go on: save what there is; says where, in a few words, or nothing.
            begins_anew: the host begins the whole run anew, and knows a lack of memory by its words.
        """
        self._again, self._keep, self._begins_anew = again, keep, begins_anew

    # -- a host's batch ------------------------------------------------------------------------------------------

    def note(self, step: Callable[[], Any], samples: int, cannot: Callable[[], str] = lambda: "") -> None:
        """A batch is about to enter the window. See `Step`; call it before the batch is counted."""
        if self.run.window.empty:
            self._steps.clear()
            self._all_noted = True
        # Not those of a window that a resumed run goes on with.
        self._all_noted = self._all_noted and len(self._steps) == self.run.window.micro_batches
        self._steps.append(Step(step, samples, cannot, Generators.now()))

    def left_out(self) -> None:
        """The batch that was noted last has no backward."""
        self._steps.pop()

    def forget(self) -> None:
        """The window is over."""
        self._steps.clear()

    def guarded(self, call: Callable[[], T]) -> T:
        """What `call` returns: a part of the noted step. Where memory runs out, what the step returns when done again.

        Raises:
            OutOfMemory: the batch cannot be divided further; the window is dropped.
        """
        began = time.perf_counter()
        try:
            return call()
        except Exception as error:
            if isinstance(error, TOLD) or not self._steps or not memory.is_out_of_memory(error):
                raise
            memory.let_go(error)
        found: T = self._repeat(began)
        return found

    def _repeat(self, began: float) -> Any:
        at, found, before = self._steps[-1], None, self.limit
        while True:
            self._halve(at, before)
            try:
                for at in self._steps:
                    last = time.perf_counter()
                    at.random.put_back()
                    found = at.run()
            except Exception as error:
                if isinstance(error, TOLD) or not memory.is_out_of_memory(error):
                    raise
                memory.let_go(error)
            else:
                self.run.forgive(last - began)
                return found

    def _halve(self, step: Step, before: int | None) -> None:
        """Half of the samples that this step had in one forward; the window is as it was before its first.

        `before` is the limit before this window's first lack of memory, which stays where halving does not help.
        """
        size = min(self.limit or step.samples, step.samples)
        why = step.cannot() or ("one sample is the least" if size <= 1 else "")
        if not self._all_noted:
            why = why or "its window began before this run was resumed, or without training_step"
        self.run.window.again()
        self.statistics.restore()
        self.run.clear_gradients()
        half = -(-size // 2)
        self._divide(before if why else half)
        self._again()
        gc.collect()
        devices.empty_cache(self.device)
        if why:
            self._stop(size, why)
        self.run.out_of_memory(half)
        self.run.warn(
            f"out of memory at update {self.run.updates}: the micro-batch of {size} becomes {half}, accumulation grows "
            "as much, an update keeps its samples; the window is done again"
        )

    def _divide(self, limit: int | None) -> None:
        self.limit, self.run.window.divided = limit, limit is not None
        self.statistics.apply(self.run.window.expected * self.pieces)
        self.describe(self._micro_batch)

    def _stop(self, size: int, why: str) -> None:
        self._steps[0].random.put_back()
        self.forget()
        self.run.drop()
        kept = self._keep()
        raise OutOfMemory(
            f"out of memory at update {self.run.updates} with a micro-batch of {size}, which cannot be made smaller "
            f"({why}); the weights are those of the update before{kept and f', {kept}'}. Use precision=bf16, a smaller "
            "input, or a smaller batch with accumulate as much larger"
        )

    # -- the update ----------------------------------------------------------------------------------------------

    @contextmanager
    def updating(self) -> Iterator[None]:
        """An update, or a part of it, runs inside. Smaller micro-batches do not help there: activations are gone.

        Nothing is saved: an optimizer changes its state first and the weights after it, some before others.

        Raises:
            UpdateOutOfMemory: memory ran out; the window is dropped.
        """
        try:
            yield
        except Exception as error:
            told = self._begins_anew or isinstance(error, UpdateOutOfMemory)
            if told or not memory.is_out_of_memory(error):
                raise
            memory.let_go(error)
            self.run.clear_gradients()
            self.forget()
            self.run.drop()
            gc.collect()
            devices.empty_cache(self.device)
            raise UpdateOutOfMemory(
                f"out of memory in the optimizer's step of update {self.run.updates}; some weights may have it and "
                "others not: begin again, or go on from the last checkpoint. A smaller batch does not help: use an "
                "optimizer with a smaller state (8-bit, Adafactor), foreach=False, or train fewer parameters"
            ) from None

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        """Of one of the host's batches."""
        return -(-self._micro_batch // self.limit) if self.limit and self._micro_batch else 1

    def describe(self, micro_batch: int) -> None:
        """Tell the report the sizes in force, for a host's batch of so many samples."""
        self._micro_batch, expected = micro_batch, self.run.window.expected
        self.run.sizes(expected * self.pieces, min(self.limit or micro_batch, micro_batch), expected * micro_batch)

    def state_dict(self) -> dict[str, Any]:
        """The most samples of a piece, if there is a limit: a resumed run divides as this one does."""
        return {"micro_batch": self.limit} if self.limit is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self._divide(int(state["micro_batch"]))
        self.run.warn(f"memory ran out in the run that is resumed: a forward has at most {self.limit} samples")
