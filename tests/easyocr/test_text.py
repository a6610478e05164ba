"""Labels in the spelling and order of their character set; reports 882, 1143 and their kin."""

from __future__ import annotations

import unicodedata

import pytest

from integrations.easyocr.charset import characters_of, fold_case, languages_told
from integrations.easyocr.data import Skipped, keep_trainable, read_folder
from integrations.easyocr.settings import read_settings
from integrations.easyocr.text import Spelling, logical, named, suspicious
from tests.easyocr.conftest import write_folder

LATIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "


def spelt(label, characters, **options):
    spelling = Spelling(characters, read_settings(options)[0])
    return spelling(label), " ".join(spelling.sentences())


def decomposed(text):
    return unicodedata.normalize("NFD", text)


@pytest.mark.parametrize(
    ("typed", "characters", "learnt"),
    [
        (decomposed("Größe"), LATIN + "öß", "Größe"),
        ("Größe", LATIN + "\u0308ß", decomposed("Größe")),  # a set typed on macOS
        (decomposed("x\u0302ö"), LATIN + "ö\u0302", "x\u0302ö"),
        ("\u0958", "\u0958\u0915\u093c", "\u0958"),  # a letter that NFC would take apart stays
        ("\u0958", "\u0915\u093c", "\u0915\u093c"),
        (decomposed("한글"), "한글", "한글"),
        (decomposed("ü\u200b"), "ü", "ü"),
        ("\u2764\ufe0f 葛\U000e0100", "\u2764 葛", "\u2764 葛"),  # an emoji and a Han character with their selectors
        ("\u2764\ufe0f", "\u2764\ufe0f", "\u2764\ufe0f"),
    ],
)
def test_a_label_takes_the_unicode_form_of_its_set(typed, characters, learnt):
    assert spelt(typed, characters)[0] == learnt


def test_every_change_is_told_with_an_example():
    for typed, characters, learnt, told in [
        (decomposed("Tür"), LATIN + "ü", "Tür", r"1 labels brought into the Unicode form .* 'Tu\u0308r'"),
        ("Sum\u00a012\t3", LATIN, "Sum 12 3", r"'Sum\xa012\t3': trained as plain spaces"),
        ("a\ufeffb\u200bc\u00ad", LATIN, "abc", r"1 labels with invisible characters, such as 'a\ufeffb\u200bc\xad'"),
    ]:
        label, notes = spelt(typed, characters)
        assert label == learnt
        assert all(part in notes for part in told.split(" .* ")), notes
    assert spelt("as written: 0012", LATIN + ":") == ("as written: 0012", "")


def test_characters_that_the_set_holds_are_kept():
    for typed in ("a\u00a0b", "a\u3000b", "ا\u200cب", "a\u200bb"):
        assert spelt(typed, typed, label_order="visual") == (typed, "")
    assert spelt("１２", "１２0123")[0] == "１２"  # full-width digits look different


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("אבג", "גבא"),
        ("אבג 12.50", "12.50 גבא"),
        ("12 אבג", "גבא 12"),
        ("אבג Total 12", "Total 12 גבא"),
        ("a אב b", "a בא b"),
        ("מחיר: 12%", "12% :ריחמ"),
        ("(אבג)", ")גבא("),
        ("مرحبا ١٢٣", "١٢٣ ابحرم"),
        ("שָׁלוֹם", "שָׁלוֹם"[::-1]),
    ],
)
def test_882_right_to_left_labels_are_learnt_as_shown_and_come_back_as_typed(typed, shown):
    label, told = spelt(typed, "")
    assert label == shown
    assert logical(label) == typed
    assert "1 right-to-left labels" in told
    assert "mix directions" not in told
    assert spelt(typed, "", label_order="visual") == (typed, "")


def test_a_line_whose_order_its_picture_cannot_tell_is_named():
    label, told = spelt("Total אבג", "")
    assert label == "Total גבא"
    assert "1 of them mix directions" in told
    assert "'Total אבג'" in told


def test_left_to_right_text_is_never_turned():
    for text in ("12 Total", "(a) 1-2", "١٢٣"):
        assert spelt(text, "")[0] == logical(text) == text


@pytest.mark.parametrize(
    ("label", "characters", "turkish", "folded"),
    [
        ("İzmir", LATIN, False, "izmir"),
        ("İZMİR", "İZMR", False, "İZMİR"),
        ("DIŞ İÇ", "dışiç ", True, "dış iç"),
        ("diş", "DİŞIÇ", True, "DİŞ"),
        ("Straße", "STRAEß", False, "STRAßE"),
        ("ﬁn", "FINﬁ", False, "ﬁN"),
        ("ΟΔΟΣ", "οδσς", False, "οδος"),
    ],
)
def test_folding_keeps_one_letter_one_letter(label, characters, turkish, folded):
    assert fold_case(label, characters, turkish) == folded


def test_a_turkish_set_folds_by_its_language():
    assert spelt("IĞDIR", "ığdr", sensitive=False, lang_list=["tr"])[0] == "ığdır"
    assert spelt(decomposed("İzmir"), LATIN, sensitive=False)[0] == "izmir"


def test_a_set_taken_from_labels_holds_neither_two_forms_nor_invisible_characters():
    settings, _ = read_settings({"lang_char": "None"})
    labels = ["ö\u200b", decomposed("ö"), "a\u00a0b", "a b", "\ufeffא\u200f", "\u2764\ufe0f"]
    assert characters_of(settings, map(Spelling("", settings), labels)) == " aböא\u2764"


def test_characters_that_do_not_show_what_they_are_have_their_code_points(tmp_path):
    assert named(list("ab")) == "ab"
    assert named(["\t", " ", "b"]) == "b, U+0009, U+0020 SPACE"
    assert named(["a", "\u0308", "\u00a0", "а"]) == "a, U+0308 COMBINING DIAERESIS, U+00A0 NO-BREAK SPACE, а U+0430"
    lines = read_folder(write_folder(tmp_path / "x", ["a", "q\u0308"]), "train_data", Skipped())
    skipped = Skipped()
    keep_trainable(lines, "aq", read_settings({})[0], skipped)
    assert "characters outside the set (U+0308 COMBINING DIAERESIS)" in skipped.sentences()[0]


def test_what_a_picture_hardly_shows_is_told():
    told = suspicious([" a", "b", '"x, y"', '"say ""hi"""', '"quoted"'])
    assert told[0].startswith("1 labels begin or end with a space: trained as written, such as ' a'")
    assert told[1].startswith("2 labels stand in quotes")
    assert "if its picture shows 'x, y', write that" in told[1]
    assert "shows 'say \"hi\"'" in suspicious(['"say ""hi"""'])[0]
    assert suspicious(["a", '"quoted"', '"', ""]) == []


def test_letters_of_another_script_than_the_languages_are_told():
    (told,) = languages_told(LATIN + "абвгд", ["en"])
    assert told.startswith("lang_list=['en']: lacks 'а' and 4 more letters")
    assert languages_told(LATIN + "абвгд", ["en", "ru"]) == languages_told(LATIN + "éß€", ["en"]) == []
    assert "'ru'" in languages_told("абвгдеёжзийклмнопрстуфхцчшщъыьэюя", ["en"])[0]
