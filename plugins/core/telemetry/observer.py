"""Who looks at a run from outside, such as a trial of it. It changes nothing of the run, but may end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from plugins.core.step.update import Outcome


class Observer:
    """Looks at nothing; what is to be seen is a method each."""

    def arrived(self, first: bool) -> None:
        """A micro-batch came from the loader; `first` of its window."""

    def loss(self, value: Tensor, weight: float | Tensor) -> None:
        """The loss of the micro-batch at hand, 0-dim, a mean over `weight` targets."""

    def closed(self, outcome: Outcome) -> None:
        """An update is over, and counted."""

    def resized(self, micro_batch: int) -> None:
        """A micro-batch has so many samples from now on."""

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Validation runs inside."""
        yield

    def ended(self) -> None:
        """The run is over, also after an error."""
