"""How the settings refuse a value."""

from __future__ import annotations

from typing import Any

import pytest

from plugins import AccelConfig, AccelError


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(AccelError) as caught:
        AccelConfig(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
