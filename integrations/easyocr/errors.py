"""The one error of this folder: a single line that names the file or key, the value and what is allowed."""

from integrations.refusal import Refusal


class EasyOCRError(Refusal):
    """A mistake in the user's configuration, data or weights."""
