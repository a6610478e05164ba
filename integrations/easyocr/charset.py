"""Character sets: built from the configuration, or from the training labels; and which languages the Reader knows.

Class 0 of a recognizer is the CTC blank; class i + 1 is character i. Order and duplicates are kept, as EasyOCR does.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import Settings


def characters_of(settings: Settings, training_labels: Iterable[str]) -> str:
    """What the yaml gives: number + symbol + lang_char; at `lang_char: 'None'` the training labels' own, sorted."""
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


def fold_case(label: str, characters: str, turkish: bool = False) -> str:
    """`sensitive: False`: the label in the case that the set holds; lower case where it holds both or none.

    The official trainer folds to lower case always, and so drops every letter of an upper-case set. A letter stays one
    letter: `İ` becomes `i` (Python makes `i` + U+0307 of it), and `ß` has no upper case (Python: `SS`).

    Args:
        label: as typed.
        characters: of the set.
        turkish: pairs `ı` with `I` and `i` with `İ`.
    """
    known = set(characters)
    lower = (label.replace("I", "ı") if turkish else label).replace("İ", "i").lower()
    if set(lower) <= known:
        return lower
    pairs = ((letter, letter.upper()) for letter in (label.replace("i", "İ") if turkish else label))
    upper = "".join(large if len(large) == 1 else letter for letter, large in pairs)
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


def languages_told(characters: str, lang_list: list[str]) -> list[str]:
    """A note where `characters` hold letters of another script than `lang_list`: the Reader is opened by language."""
    from easyocr.config import all_lang_list

    letters = {letter for letter in characters if letter.isalpha() and not letter.isascii()}
    foreign = {letter for letter in letters if not unicodedata.name(letter, "LATIN").startswith("LATIN")}
    missing = foreign - set().union(*map(_letters_of, lang_list))
    if not missing:
        return []
    held = {lang: _letters_of(lang) for lang in all_lang_list}
    best = min(held, key=lambda lang: (-len(held[lang] & missing), len(held[lang]), lang))
    found = held[best] & missing
    if len(found) < 2:
        return []  # a sign such as `ª`, and no script
    return [
        f"lang_list={lang_list}: lacks {min(found)!r} and {len(found) - 1} more letters of the character set; "
        f"easyocr.Reader([{best!r}], …) will refuse this network unless lang_list holds {best!r}"
    ]


def _letters_of(lang: str) -> set[str]:
    from easyocr.config import BASE_PATH

    path = Path(BASE_PATH) / "character" / f"{lang}_char.txt"
    return set(path.read_text(encoding="utf-8-sig")) if path.is_file() else set()
