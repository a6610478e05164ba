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
        self._on_device: dict[str, Tensor] = {}  # by term: whether a batch since `tell` had one

    def look(self, rule: Counting, batches: Iterable[Any]) -> None:
        """At the batches of a window; of batches on a device nothing is read."""
        for found in map(rule.loses, batches):
            self.note(found, LOST)

    def note(self, found: Tensor | int | None, term: str) -> None:
        """One answer to whether a term is inexact; where it lies on a device it is not read here."""
        if isinstance(found, Tensor):
            self._on_device[term] = found | self._on_device[term] if term in self._on_device else found
        elif found:
            self.approximate(term)

    def tell(self) -> None:
        """What only the device knows yet: one read a term, where there is something to ask."""
        noted, self._on_device = self._on_device, {}
        for term, found in noted.items():
            if bool(found):
                self.approximate(term)
