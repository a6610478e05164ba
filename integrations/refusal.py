"""The root of every error by which an adapter refuses what a user gave; a plug shows it as its own, in one line."""

LONGEST = 1200  # characters of a message; a value in it may be a whole file


class Refusal(ValueError):
    """A mistake in the user's input, or a run that cannot be served. `str(error)` is one line."""

    one_line = True  # so a host's command shows no traceback

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnsupportedRun(Refusal):
    """A host's own setting or state that the plug refuses; the message is one line that names it."""


def one_line(message: str) -> str:
    """The message without line breaks, in characters that every terminal takes; of a long one both ends."""
    text = " ".join(message.split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
