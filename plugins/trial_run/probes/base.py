"""What every probe of a trial is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from plugins.core.session import Session
from plugins.core.step.update import Outcome

Write = Callable[..., None]


class Probe:
    """Looks at one thing of a session, or changes one thing for a trial.

    Args:
        session: of the trial.
        write: appends a line to the record.
        argument: what stands behind the colon of the probe's name in `TrialRequest.checks`.
    """

    def __init__(self, session: Session, write: Write, argument: str = "") -> None:
        self.session, self.write, self.argument = session, write, argument

    def begin(self) -> None:
        """The session is built."""

    def arrived(self, first: bool) -> None:
        """A micro-batch came; `first` of its window."""

    def loss(self, value: Tensor) -> None:
        """Its loss, before its backward."""

    def closed(self, outcome: Outcome) -> dict[str, Any]:
        """An update is over; what is to stand in its line of the record."""
        return {}

    def end(self) -> None:
        """The trial is over."""
