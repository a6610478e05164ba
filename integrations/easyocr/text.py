"""From a label as typed to the text that a network learns, and from what it reads back to the text as typed.

A network learns what a picture shows, from left to right. What a picture cannot show is brought into the form that
the character set holds: the Unicode normal form (macOS writes `o` + U+0308 for `ö`), the case, look-alike spaces,
invisible characters. Labels of a right-to-left script are turned into the picture's order, as EasyOCR's own Arabic
networks are trained; their Reader turns what it reads back.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence

from integrations.easyocr.charset import fold_case
from integrations.easyocr.settings import Settings

_JOINERS = {"\u200c", "\u200d"}  # they change the shape of their neighbours
_WIDE_SPACE = "\u3000"
_NAMED = 20  # characters in a message


class Spelling:
    """Spells labels with `characters`; an empty set stands for one that is still to be taken from the labels.

    changed counts labels by what was done to them; examples holds one label of each kind, as typed.
    """

    def __init__(self, characters: str, settings: Settings) -> None:
        self.characters, self.known = characters, set(characters)
        self.composed = all(unicodedata.normalize("NFC", character) == character for character in self.known)
        self.fold = not settings.sensitive
        self.turkish = bool({"tr", "az"} & set(settings.lang_list))
        self.turn = settings.label_order == "logical"
        self.changed: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def __call__(self, typed: str) -> str:
        """The text that the network learns for a label as typed."""
        held = typed.isprintable() and (self.known.issuperset(typed) if self.known else typed.isascii())
        if not (held and self.composed and unicodedata.is_normalized("NFC", typed) and not right_to_left(typed)):
            typed = self._respelt(typed)
        return fold_case(typed, self.characters, self.turkish) if self.fold else typed

    def _respelt(self, typed: str) -> str:
        label = self._told(typed, self._normal(typed), "form")
        label = self._told(label, "".join(map(self._space, label)), "spaces")
        visible = "".join(character for character in label if not self._invisible(character))
        if self.turn and right_to_left(label):
            shown = "".join(character for character in _display(label) if not self._invisible(character))
            self._note("turned", typed)
            if logical(shown) != visible:
                self._note("mixed", typed)
        else:
            shown = visible
        self._told(label, visible, "invisible")
        return shown

    def sentences(self) -> list[str]:
        """What was done to how many labels, for the user."""
        told = {
            "form": "labels brought into the Unicode form of the character set (NFC, or NFD where it holds that), such "
            "as {example!a}",
            "spaces": "labels with other spaces than the set's, such as {example!a}: trained as plain spaces",
            "invisible": "labels with invisible characters, such as {example!a}: trained without them",
            "turned": "right-to-left labels: trained in the order of their picture, from left to right, and given back "
            "as typed by result.reader(); label_order: visual if they are written in that order already",
            "mixed": "of them mix directions in a way that a picture cannot tell: their parts come back in another "
            "order, such as {example!r}",
        }
        return [
            f"{self.changed[kind]} {text.format(example=self.examples[kind])}"
            for kind, text in told.items()
            if self.changed[kind]
        ]

    def _told(self, before: str, after: str, kind: str) -> str:
        if before != after:
            self._note(kind, before)
        return after

    def _note(self, kind: str, example: str) -> None:
        self.changed[kind] += 1
        self.examples.setdefault(kind, example)

    def _normal(self, label: str) -> str:
        """The first of NFC, as typed and NFD that the set holds wholly.

        As typed comes first in a set that NFC would change (several Indic letters).
        """
        forms = [label, unicodedata.normalize("NFC", label), unicodedata.normalize("NFD", label)]
        if self.composed:
            forms[:2] = forms[1::-1]
        # What differs in spaces and invisible characters alone is settled later.
        held = (form for form in forms if self.known.issuperset(c for c in form if unicodedata.category(c)[0] in "LM"))
        return forms[0] if not self.known else next(held, forms[0])

    def _space(self, character: str) -> str:
        """A plain space for one that the set lacks and that looks alike."""
        if character in self.known or not (character == "\t" or unicodedata.category(character) == "Zs"):
            return character
        return character if not self.known and character == _WIDE_SPACE else " "

    def _invisible(self, character: str) -> bool:
        if unicodedata.name(character, "").startswith("VARIATION SELECTOR"):  # of an emoji or a Han character
            return character not in self.known
        # Category Cf has a few visible signs, all of Arabic numbers.
        if unicodedata.category(character) != "Cf" or unicodedata.bidirectional(character) == "AN":
            return False
        return character not in (self.known or _JOINERS)


def named(characters: list[str]) -> str:
    """Characters for a message: what does not show what it is comes with its code point."""
    plain = "".join(character for character in characters if "!" <= character <= "~")
    others = [character for character in characters if character not in plain]
    shown = [f"{plain}"] * bool(plain) + [_with_code_point(character) for character in others[:_NAMED]]
    return ", ".join([*shown, *(["…"] * (len(others) > _NAMED))])


def _with_code_point(character: str) -> str:
    if unicodedata.category(character)[0] in "MCZ":  # a mark, a control character, a space
        return f"U+{ord(character):04X} {unicodedata.name(character, '')}".strip()
    return f"{character} U+{ord(character):04X}"


def right_to_left(text: str) -> bool:
    """Whether `text` holds a letter of a right-to-left script."""
    return any(unicodedata.bidirectional(character) in ("R", "AL") for character in text)


def _display(text: str, base: str | None = None) -> str:
    from bidi import get_display

    shown: str = get_display(text, base_dir=base)
    return shown


def logical(shown: str) -> str:
    """The text as typed of a picture that shows `shown` from left to right.

    Where a line that is read from the right explains the picture, it is taken for one: `Total` left of a Hebrew word is
    its end as a rule. The Reader's own rule takes the first word's direction for the line's.
    """
    if not right_to_left(shown):
        return shown
    typed = _display(shown, "R")
    return typed if _display(typed) == shown else _display(shown)


def suspicious(labels: Sequence[str]) -> list[str]:
    """What labels hold that their pictures hardly show; it is trained as written."""
    spaced = [label for label in labels if label != label.strip(" ")]
    quoted = [
        label for label in labels if len(label) > 1 and label[0] == label[-1] == '"' and set(',"') & set(label[1:-1])
    ]
    told = [("labels begin or end with a space", spaced, "")] * bool(spaced)
    if quoted:
        bare = quoted[0][1:-1].replace('""', '"')
        what = "labels stand in quotes, as csv writers and spreadsheets put those with a comma or a quote in them"
        told.append((what, quoted, f"; if its picture shows {bare!r}, write that after the file's name and the comma"))
    return [f"{len(such)} {what}: trained as written, such as {such[0]!r}{then}" for what, such, then in told]
