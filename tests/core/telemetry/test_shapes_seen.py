from __future__ import annotations

import pytest

from plugins.core.telemetry.shapes_seen import Seen


def test_seen_shapes_and_padding() -> None:
    seen = Seen()
    assert seen.padding_fraction is None
    seen.add([2, 4], padding=2, elements=8)
    seen.add((2, 4), padding=0, elements=8)
    assert seen.shapes == {(2, 4): 2}
    assert seen.padding_fraction == pytest.approx(1 / 8)
