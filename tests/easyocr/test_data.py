"""Reading labels and pictures; the cases 936, 1056, 580, 1143 and 757."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pytest
from PIL import Image

from integrations.easyocr import data, images
from integrations.easyocr.charset import characters_of
from integrations.easyocr.data import Skipped, keep_trainable, leaves, read_any, read_folder
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import read_settings
from tests.easyocr.conftest import CASES, STOCK_CHARACTERS, draw, write_folder


def expected(name):
    return json.loads((CASES / name / "expected.json").read_text(encoding="utf-8"))


def served(folder, **options):
    """Labels that a run over `folder` would train on."""
    settings, _ = read_settings(options)
    skipped = Skipped()
    lines = read_folder(folder, "train_data", skipped)
    characters = characters_of(settings, [line.label for line in lines.lines])
    return [line.label for line in keep_trainable(lines, characters, settings, skipped).lines], skipped


@pytest.mark.parametrize("name", ["936_digits", "1056_commas", "580_bom"])
def test_labels_are_text_as_written(case, name):
    labels, skipped = served(case(name))
    assert labels == expected(name)["labels"]
    assert not skipped.counts


def test_580_a_wrong_delimiter_is_told(case):
    with pytest.raises(EasyOCRError) as error:
        read_folder(case("580_semicolon"), "train_data", Skipped())
    assert all(part in str(error.value) for part in expected("580_semicolon")["error_names"])


def test_1143_an_upper_case_set_keeps_everything(case):
    right, folder = expected("1143_uppercase"), case("1143_uppercase")
    for sensitive in (right["sensitive"], False):
        labels, _ = served(folder, number=right["characters"], sensitive=sensitive)
        assert labels == right["labels"]


def test_757_filtering_off_serves_every_row(case):
    right = expected("757_unfiltered")
    labels, _ = served(case("757_unfiltered"), data_filtering_off=right["data_filtering_off"], batch_max_length=3)
    assert labels == right["labels"]


def test_what_is_left_out_is_counted_and_listed(tmp_path):
    folder = write_folder(tmp_path / "x", ["12", "a7", "1234567"])
    (folder / "bad.png").write_bytes(b"no picture")
    with (folder / "labels.csv").open("a", encoding="utf-8") as file:
        file.write("gone.png,5\nbad.png,6\n0.png,\n")
    labels, skipped = served(folder, number="0123456789", batch_max_length=5)
    assert labels == ["12"]
    told = " | ".join(skipped.sentences())
    assert "1 left out, missing image: " in told
    assert "gone.png" in told
    assert "corrupt image" in told
    assert "characters outside the set (a)" in told
    assert "longer than batch_max_length=5" in told
    assert "empty label" in told


def test_lines_lost_to_batch_max_length_are_counted_with_the_value_that_keeps_them(tmp_path):
    folder = write_folder(tmp_path / "x", ["12", "3" * 30, "4" * 41, "a"])
    labels, skipped = served(folder, number="0123456789")
    assert labels == ["12"]
    (told,) = skipped.too_long_told(25)
    assert told == "2 of 4 lines are lost, labels longer than batch_max_length=25: batch_max_length: 41 keeps them all"
    assert served(folder, number="0123456789", batch_max_length=41)[1].too_long_told(41) == []
    with pytest.raises(EasyOCRError, match="batch_max_length: 41 keeps them all"):
        served(folder, number="34", symbol="5")


def test_a_crop_too_long_to_keep_its_width_is_left_out(tmp_path):
    folder = write_folder(tmp_path / "x", ["1", "2", "3", "4"])
    for name, size in (("0", (100_000, 64)), ("1", (1000, 20)), ("2", (1001, 20)), ("3", (2, 101))):
        Image.new("L", size).save(folder / f"{name}.png")
    labels, skipped = served(folder, number="1234")
    assert labels == ["2"]
    (told,) = skipped.sentences()
    assert told.startswith("3 left out, longer side over 50 times the shorter one: ")
    assert all(str(folder / f"{name}.png") in told for name in "023")
    assert served(folder, number="1234", preprocess="official")[0] == ["1", "2", "3", "4"]  # squeezed to imgW


def test_errors_name_the_file(tmp_path):
    with pytest.raises(EasyOCRError, match="no such folder"):
        leaves(tmp_path / "none", "train_data")
    with pytest.raises(EasyOCRError, match=r"no labels.csv"):
        leaves(tmp_path, "train_data")
    folder = write_folder(tmp_path / "x", ["abc"])
    with pytest.raises(EasyOCRError, match=r"no line is left to train on .*characters outside the set"):
        served(folder, number="0123456789")
    (folder / "labels.csv").write_text("filename,words\nno comma here\n")
    with pytest.raises(EasyOCRError, match=r"labels.csv: line 2 is 'no comma here'"):
        read_folder(folder, "train_data", Skipped())
    (folder / "labels.csv").write_bytes("filename,words\n0.png,café\n".encode("latin-1"))
    with pytest.raises(EasyOCRError, match="not UTF-8"):
        read_folder(folder, "train_data", Skipped())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_line_feeds_end_a_row(tmp_path, end):
    labels = ["a\u2028b", "c\x85d", "e\x0cf", "g\x1ch"]
    rows = ["filename,words", *(f"{number}.png,{label}" for number, label in enumerate(labels))]
    (tmp_path / "labels.csv").write_bytes(end.join(rows).encode())
    assert [label for _, label in data.read_labels(tmp_path)] == labels


def test_a_name_that_no_file_can_have_is_a_missing_image(tmp_path):
    folder = write_folder(tmp_path / "x", ["12"])
    with (folder / "labels.csv").open("a", encoding="utf-8") as file:
        file.write("a" * 300 + ".png,5\nb\0.png,6\n")
    labels, skipped = served(folder, number="0123456789")
    assert labels == ["12"]
    assert skipped.counts == {"missing image": 2}


def test_nothing_left_to_validate_is_not_told_as_training(tmp_path):
    lines = read_folder(write_folder(tmp_path / "x", ["a"]), "valid_data", Skipped())
    with pytest.raises(EasyOCRError, match="valid_data: no line is left to read"):
        keep_trainable(lines, "0", read_settings({})[0], Skipped())


def test_a_picture_that_is_lost_after_it_was_read(tmp_path):
    folder = write_folder(tmp_path / "x", ["12", "34"])
    lines = read_folder(folder, "train_data", Skipped())
    assert lines.grey(0) is not None
    assert lines.grey(1) is not None
    (folder / "0.png").unlink()
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:-200])
    assert lines.grey(0) is None
    assert lines.grey(1) is None


def test_leaf_folders_at_any_depth(tmp_path):
    write_folder(tmp_path / "all" / "a" / "deep", ["1", "2"])
    write_folder(tmp_path / "all" / "b", ["3"])
    lines = read_folder(tmp_path / "all", "train_data", Skipped())
    assert [line.label for line in lines.lines] == ["1", "2", "3"]
    assert lines.grey(0).dtype == np.uint8


def test_a_picture_lying_on_its_side_has_the_size_that_the_reader_sees(tmp_path):
    folder = write_folder(tmp_path / "x", ["12"])
    picture, exif = draw("12345"), Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "0.jpg", exif=exif)
    (folder / "labels.csv").write_text("filename,words\n0.jpg,12345\n")
    lines = read_folder(folder, "train_data", Skipped())
    assert (lines.lines[0].height, lines.lines[0].width) == lines.grey(0).shape == picture.size


@pytest.mark.parametrize("form", ["tif", "webp", "png", "avif", "bmp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_of_a_turned_picture_is_the_one_that_is_read(tmp_path, form, orientation):
    picture, exif, path = draw("12345"), Image.Exif(), tmp_path / f"0.{form}"
    exif[0x0112] = orientation
    try:
        picture.save(path, exif=exif)
    except (OSError, KeyError):
        pytest.skip(f"this Pillow writes no {form}")
    if (grey := images.read_grey(path)) is not None:
        assert images.size_of(path) == grey.shape[::-1]


def test_text_that_only_transparency_shows_is_left_out(tmp_path):
    folder = write_folder(tmp_path / "x", ["1", "2", "3"])
    for name, ink in (("0", (0, 0, 0, 255)), ("1", (255, 255, 255, 255))):
        picture = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
        picture.paste(ink, (10, 10, 20, 20))
        picture.save(folder / f"{name}.png")
    labels, skipped = served(folder, number="0123456789")
    assert labels == ["2", "3"]
    assert skipped.counts == {"one colour to the Reader, which drops transparency": 1}
    rows, skipped = rows_of(*(Image.open(folder / f"{name}.png") for name in "012")), Skipped()
    assert [line.row for line in read_any(rows, "train", read_settings({})[0], skipped).lines] == [1, 2]
    assert skipped.counts == {"one colour to the Reader, which drops transparency": 1}


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "LA", "RGBA", "YCbCr", "I;16"])
def test_pictures_of_every_mode_are_read(tmp_path, mode):
    ink, folder = np.full((30, 50), 255, np.uint8), write_folder(tmp_path / "x", ["12"])
    ink[10:20, 10:40] = 0
    forms = ["png", "tif"] if mode == "I;16" else ["png", "tif", "jpg", "webp", "bmp"]  # Pillow cuts 16 bits elsewhere
    read = 0
    for form in forms:
        picture = Image.fromarray(ink.astype(np.uint16) * 257 if mode == "I;16" else ink)
        try:
            (picture if mode == "I;16" else picture.convert("RGB").convert(mode)).save(folder / f"0.{form}")
        except OSError:
            continue  # no such picture in this form
        (folder / "labels.csv").write_text(f"filename,words\n0.{form},12\n")
        lines = read_folder(folder, "train_data", Skipped())
        grey = lines.grey(0)
        assert grey.shape == (lines.lines[0].height, lines.lines[0].width)
        assert np.abs(grey.astype(int) - ink).mean() < 5, form
        read += 1
    assert read >= 2 or mode in ("CMYK", "YCbCr")


def test_a_file_name_in_another_unicode_form_or_of_windows_is_found(tmp_path):
    folder = write_folder(tmp_path / "x", ["1", "2"])
    (folder / "deep").mkdir()
    (folder / "0.png").rename(folder / unicodedata.normalize("NFD", "Größe.png"))
    (folder / "1.png").rename(folder / "deep" / "1.png")
    (folder / "labels.csv").write_text("filename,words\nGröße.png,1\ndeep\\1.png,2\n", encoding="utf-8")
    assert served(folder, number="12")[0] == ["1", "2"]


def test_many_unknown_characters_are_one_note(tmp_path):
    folder = write_folder(tmp_path / "x", ["1", "a", "é", "\u00a0", "b c"])
    _, skipped = served(folder, number="1", symbol="z")
    (told,) = skipped.sentences()
    assert told.startswith("4 left out, characters outside the set (abc, U+0020 SPACE, é U+00E9): ")


def test_hugging_face_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = [draw("0012"), draw("NA")]
    source = datasets.Dataset.from_dict(
        {"image": pictures, "text": ["0012", "NA"]},
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )
    source.save_to_disk(str(tmp_path / "saved"))
    settings, _ = read_settings({})
    for given in (source, str(tmp_path / "saved")):
        lines = read_any(given, "train", settings, Skipped())
        assert [line.label for line in lines.lines] == ["0012", "NA"]
        assert [(line.width, line.height) for line in lines.lines] == [p.size for p in pictures]
        assert np.array_equal(lines.grey(1), np.asarray(pictures[1]))
    with pytest.raises(EasyOCRError, match="text_column=words: no such column in train; allowed are image, text"):
        read_any(source, "train", read_settings({"text_column": "words"})[0], Skipped())


def rows_of(*pictures):
    """A Hugging Face data set of these pictures, each labelled 12."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict({"image": list(pictures), "text": ["12"] * len(pictures)}, features=features)


def test_pictures_of_many_bits_are_read_as_from_their_files(tmp_path):
    wide = np.asarray(draw("12")).astype(np.uint16) * 256 + 77
    Image.fromarray(wide).save(tmp_path / "0.png")
    (tmp_path / "labels.csv").write_text("filename,words\n0.png,12\n")
    file = read_folder(tmp_path, "x", Skipped()).grey(0)
    for picture in (
        Image.fromarray(wide),
        Image.fromarray(wide.astype(np.int32)),
        Image.fromarray(wide.astype(np.float32)),
        Image.fromarray((wide // 256).astype(np.int32)),
        Image.fromarray((wide // 256 / np.float32(255)).astype(np.float32)),
    ):
        assert np.abs(data.grey_of(picture).astype(int) - file).max() <= 1, picture.mode
    lines = read_any(rows_of(str(tmp_path / "0.png")), "train", read_settings({})[0], Skipped())
    assert np.array_equal(lines.grey(0), file)


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas"])
def test_the_format_of_a_data_set_does_not_matter(form):
    picture = draw("12")
    lines = read_any(rows_of(picture).with_format(form), "train", read_settings({})[0], Skipped())
    assert np.array_equal(lines.grey(0), np.asarray(picture))


def test_a_picture_over_pillows_limit_is_left_out(monkeypatch):
    source, skipped = rows_of(draw("12"), draw("1212121212")), Skipped()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", draw("12").width * draw("12").height)
    lines = read_any(source, "train", read_settings({})[0], skipped)
    assert [line.row for line in lines.lines] == [0]
    assert skipped.counts == {"corrupt image": 1}


def test_what_is_no_single_data_set_is_told(tmp_path):
    datasets = pytest.importorskip("datasets")
    source, settings = rows_of(draw("12")), read_settings({})[0]
    several = datasets.DatasetDict(train=source)
    several.save_to_disk(str(tmp_path / "saved"))
    for given in (several, str(tmp_path / "saved")):
        with pytest.raises(EasyOCRError, match=r"train: holds several data sets; .* dataset\['train'\]"):
            read_any(given, "train", settings, Skipped())
    for given in (source.to_iterable_dataset(), [1], 5):
        with pytest.raises(EasyOCRError, match=r"train: \w+: expected a datasets.Dataset"):
            read_any(given, "train", settings, Skipped())


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
