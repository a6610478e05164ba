"""Terms that accumulation cannot make exact in some batches only: told of at once, or where a device is read anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from integrations.huggingface.loss_rules.counting import Counting

LOST = "question answering: answers outside the input, counted by their start"


class LostTerms:
    """Of one run.

    Args:
        approximate: told what is inexact.
    """

    def __init__(self, approximate: Callable[[str], None]) -> None:
        self.approximate = approximate
        self._on_device: Tensor | None = None  # whether a batch since `tell` had one

    def look(self, rule: Counting, batches: Iterable[Any]) -> None:
        """At the batches of a window; of batches on a device nothing is read."""
        for found in map(rule.loses, batches):
            if isinstance(found, Tensor):
                self._on_device = found if self._on_device is None else self._on_device | found
            elif found:
                self.approximate(LOST)

    def tell(self) -> None:
        """What only the device knows yet: one read, where there is something to ask."""
        found, self._on_device = self._on_device, None
        if found is not None and bool(found):
            self.approximate(LOST)
