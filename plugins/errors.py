"""The one error that a user can cause: a single line that names the field or file, the value and what is allowed."""


class AccelError(ValueError):
    """A mistake in the user's input, or a stop that the settings ask for.

    `str(error)` is one line, fit to be shown without a traceback.

    Args:
        message: the field or file, the value, and what is allowed; line breaks in it become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
