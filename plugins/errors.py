"""The one error that a user can cause: a single line that names the field or file, the value and what is allowed.

What the core refuses is an `AccelError` by birth. What an adapter refuses is an `integrations.refusal.Refusal`, as
adapters do not know `plugins`; `refusals_as_errors` is the one place where it becomes an `AccelError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AccelError(ValueError):
    """A mistake in the user's input, or a stop that the settings ask for.

    `str(error)` is one line, fit to be shown without a traceback.

    Args:
        message: the field or file, the value, and what is allowed; line breaks in it become spaces, and of a long
            one both ends are shown.
    """

    one_line = True  # a host's command, which does not know `plugins`, then shows no traceback

    def __init__(self, message: str) -> None:
        from integrations.refusal import one_line  # late: who imports the core loads no adapter

        super().__init__(one_line(message))


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """Inside, what an adapter refuses is raised as an error of the user's, with the same line.

    Raises:
        AccelError: the adapter refused something.
    """
    from integrations.refusal import Refusal  # late, as above

    try:
        yield
    except Refusal as error:
        raise AccelError(str(error)) from None
