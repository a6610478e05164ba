"""Memory as a user writes it."""

from __future__ import annotations

import pytest

from plugins.errors import AccelError
from plugins.find_batch.sizes import gib, shown


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("7.5GiB", 7.5), ("8GB", 8e9 / 2**30), ("512 MiB", 0.5), ("80%", 12.8), (" 100% ", 16.0), (".5gib", 0.5),
        ("2048mb", 2048e6 / 2**30), ("0.01TiB", 10.24), ("16GiB", 16.0), ("1073741824B", 1.0),
    ],
)  # fmt: skip
def test_a_size_in_any_unit_is_gib(text: str, wanted: float) -> None:
    assert gib(text, 16.0) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected a size"), ("7.5", "expected a size"), ("8G", "expected a size"), ("-1GiB", "expected a size"),
        ("1e3GiB", "expected a size"), ("many", "expected a size"), ("1,5GiB", "expected a size"),
        ("0GiB", "no memory at all"), ("0%", "no memory at all"), ("17GiB", "has 16.00 GiB"), ("101%", "has 16.00 GiB"),
    ],
)  # fmt: skip
def test_an_impossible_size_is_one_line(text: str, why: str) -> None:
    with pytest.raises(AccelError, match=f"--memory={text}: .*{why}"):
        gib(text, 16.0)


def test_sizes_are_shown_in_their_own_unit() -> None:
    assert [shown(1.254), shown(0.25), shown(None)] == ["1.25 GiB", "256 MiB", "-"]
