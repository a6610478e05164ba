"""What shapes a run met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Seen:
    """The input shapes of a run and how often each came; padding as a fraction of all elements."""

    def __init__(self) -> None:
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.elements = self.padding = 0

    def add(self, shape: Iterable[int], padding: int = 0, elements: int = 0) -> None:
        """Note one input of `shape`, `padding` of its `elements` being padding."""
        self.shapes[tuple(shape)] += 1
        self.padding += padding
        self.elements += elements

    @property
    def padding_fraction(self) -> float | None:
        """Of all elements; None where none were counted."""
        return self.padding / self.elements if self.elements else None
