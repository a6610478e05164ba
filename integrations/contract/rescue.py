"""What a host does where memory runs out. See `integrations.contract`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Rescue(Protocol):
    """What happens where memory runs out inside a window; see `plugins/core/step/rescue.py`."""

    @property
    def limit(self) -> int | None:
        """The most samples that one forward may have, since memory ran out; None before."""

    def held_by(self, again: Callable[[], None], keep: Callable[[], str] = ..., begins_anew: bool = ...) -> None:
        """What the host has to do.

        Args:
            again: the window is done again: forget what was summed up in it.
            keep: the run cannot go on: save what there is; says where, in a few words, or nothing.
            begins_anew: the host begins the whole run anew, and knows a lack of memory by its words.
        """

    def note(self, step: Callable[[], Any], samples: int, cannot: Callable[[], str] = ...) -> None:
        """A batch is about to enter the window; called before it is counted.

        Args:
            step: its forward and backward, in pieces of at most `limit` samples; may be called again.
            samples: of the batch.
            cannot: why it cannot be divided, or empty.
        """

    def left_out(self) -> None:
        """The batch that was noted last has no backward."""

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Run `call`, which is the noted step or a part of it; where memory runs out, the window is done again.

        Returns:
            What `call` returns, or the noted step when it was done again.

        Raises:
            torch.OutOfMemoryError: the batch cannot be divided; its text is one line, and the window is dropped.
        """

    def updating(self) -> AbstractContextManager[None]:
        """Inside, a host steps by itself; where memory runs out, the run stops, and its weights are not to be saved.

        Raises:
            torch.OutOfMemoryError: its text is one line, and the window is dropped.
        """
