"""Names of an earlier release, which go on to work and say once what to use instead."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class DeprecatedNames(ABC):
    """Of `plugins.loop.Accelerated`."""

    def __init__(self) -> None:
        self._deprecated: set[str] = set()

    @abstractmethod
    def tune(self, loss: Callable[[], Tensor], left: float, shape: Iterable[int]) -> None:
        """What `plan` is now."""

    @abstractmethod
    def place(self, value: Any) -> Any:
        """What `moved` is now."""

    def plan(self, loss: Callable[[], Tensor], left: float, shape: Iterable[int]) -> None:
        """The deprecated name of `tune`."""
        self.outdated("plan", "batches and training_step, or tune")
        self.tune(loss, left, shape)

    def moved(self, value: Tensor) -> Any:
        """The deprecated name of `place`."""
        self.outdated("moved", "place")
        return self.place(value)

    def outdated(self, name: str, instead: str) -> None:
        """Say it once a run."""
        if name not in self._deprecated:
            self._deprecated.add(name)
            warnings.warn(f"Accelerated: {name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)
