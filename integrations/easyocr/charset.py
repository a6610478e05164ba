"""Character sets: built from the configuration, or from the training labels; and which languages the Reader knows.

Class 0 of a recognizer is the CTC blank; class i + 1 is character i. Order and duplicates are kept, as EasyOCR does.
"""

from __future__ import annotations

from collections.abc import Iterable

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import Settings


def characters_of(settings: Settings, training_labels: Iterable[str]) -> str:
    """number + symbol + lang_char; with `lang_char: 'None'` the sorted set of the training labels' characters."""
    lang_char = settings.lang_char
    if lang_char is None:
        lang_char = "" if settings.number or settings.symbol else "None"
    if lang_char != "None":
        characters = settings.number + settings.symbol + lang_char
    else:
        characters = "".join(sorted(set().union(*training_labels)))
    if not characters:
        raise EasyOCRError(
            "number, symbol, lang_char: the character set is empty; give characters, "
            "or lang_char: 'None' to take them from the training labels"
        )
    for position, character in enumerate(characters):
        if not character.isprintable() and character not in {" ", "\u00a0", "\u200c", "\u200d", "\u3000"}:
            raise EasyOCRError(
                f"number, symbol, lang_char: entry {position} is {character!r}; allowed are printable characters"
            )
    return characters


def fold_case(label: str, characters: str) -> str:
    """`sensitive: False`: the label in the case that the set holds; lower case where it holds both or none.

    The official trainer folds to lower case always, and so drops every letter of an upper-case set.
    """
    lower, known = label.lower(), set(characters)
    if set(lower) <= known:
        return lower
    upper = label.upper()
    return upper if set(upper) <= known else lower


def check_languages(lang_list: list[str]) -> None:
    """Raises EasyOCRError for a language that `easyocr.Reader` has no character file for."""
    from easyocr.config import all_lang_list

    unknown = [lang for lang in lang_list if lang not in all_lang_list]
    if unknown or not lang_list:
        raise EasyOCRError(
            f"lang_list={lang_list}: {', '.join(map(repr, unknown)) or 'empty list'} unknown to EasyOCR; "
            f"allowed are {', '.join(sorted(all_lang_list))}"
        )
