"""What is known of the window at hand: its micro-batches, their terms, and what they were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from integrations.huggingface.loss_rules.observation import Rule


@dataclass
class LossWindow:
    """K, terms by kind over all ranks, and what was given to the micro-batches so far."""

    micro_batches: int = 0
    totals: dict[str, float] = field(default_factory=dict)  # of a user's loss
    fetched: dict[str, list[int | None]] = field(default_factory=dict)  # the same, of this rank's micro-batches
    total: Tensor | float = 0.0  # of a library's head
    number: float = 0.0  # the host's own count of all terms
    counts: deque[Tensor | int] = field(default_factory=deque)  # of a library's head, a micro-batch each
    given: list[tuple[Rule, dict[str, int | None]]] = field(default_factory=list)  # of a user's loss
    losses: list[tuple[int, Tensor]] = field(default_factory=list)  # (micro-batch from 1, loss)
    at: int = 0  # micro-batch, from 1

    def as_fetched(self, kind: str, counts: Mapping[str, int | None]) -> bool:
        """Whether the micro-batch at hand still has the terms by which the window was counted.

        A user's code that had it since then may have hidden labels, or passed on a part of it.
        """
        fetched = self.fetched.get(kind, [])
        return not 0 < self.at <= len(fetched) or fetched[self.at - 1] == counts[kind]
