"""The one error of this folder: a single line that names the file or key, the value and what is allowed."""


class EasyOCRError(ValueError):
    """A mistake in the user's configuration, data or weights. `str(error)` is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
