"""The root of every error by which an adapter refuses what a user gave; a plug shows it as its own, in one line."""


class Refusal(ValueError):
    """A mistake in the user's input, or a run that cannot be served. `str(error)` is one line."""

    one_line = True  # so a host's command shows no traceback

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnsupportedRun(Refusal):
    """A host's own setting or state that the plug refuses; the message is one line that names it."""
