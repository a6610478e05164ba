"""The characters that a network tells apart."""

from __future__ import annotations

import pytest

from integrations.easyocr import data
from integrations.easyocr.charset import characters_of
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import read_settings
from tests.easyocr.conftest import STOCK_CHARACTERS


def test_character_sets():
    assert characters_of(read_settings({"lang_char": "None"})[0], ["ba", "c1"]) == "1abc"
    assert characters_of(read_settings({"number": "10", "symbol": "a1"})[0], []) == "10a1"  # order and duplicates kept
    with pytest.raises(EasyOCRError, match="the character set is empty"):
        characters_of(read_settings({"lang_char": ""})[0], [])
    with pytest.raises(EasyOCRError, match=r"entry 1 is '\\n'"):
        characters_of(read_settings({"number": "0\n"})[0], [])


def test_insensitive_folds_to_the_case_that_the_set_holds():
    assert data.fold_case("Ab1", STOCK_CHARACTERS) == "ab1"
    assert data.fold_case("Ab1", "ABC1") == "AB1"
