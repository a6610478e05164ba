"""The host's symbols: those that the plug needs are there, and the table lists what the source takes."""

from __future__ import annotations

import pytest

from integrations.easyocr.versions import TABLE
from tests.symbols import named, taken


@pytest.mark.parametrize("symbol", TABLE, ids=[symbol.path for symbol in TABLE])
def test_the_host_has_what_the_plug_cannot_do_without(symbol) -> None:
    assert symbol.here, f"easyocr or datasets lacks {symbol.path}, which the plug takes"


def test_the_table_lists_what_the_source_takes() -> None:
    assert set(taken("easyocr", {"easyocr", "datasets"})) - named(TABLE) == set()
