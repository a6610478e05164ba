"""Reading labels and data sets; the cases 936, 1056, 580, 1143 and 757."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pytest
from PIL import Image

from integrations.easyocr import data
from integrations.easyocr.data import Skipped, keep_trainable, leaves, read_any, read_folder
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import read_settings
from tests.easyocr.conftest import CASES, draw, rows_of, served, write_folder


def expected(name):
    return json.loads((CASES / name / "expected.json").read_text(encoding="utf-8"))


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
    (tmp_path / "gt.txt").write_text("0.png\t12\n")
    with pytest.raises(EasyOCRError, match=r"no labels.csv in it or below \(gt.txt of another trainer is not read"):
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


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas"])
def test_the_format_of_a_data_set_does_not_matter(form):
    picture = draw("12")
    lines = read_any(rows_of(picture).with_format(form), "train", read_settings({})[0], Skipped())
    assert np.array_equal(lines.grey(0), np.asarray(picture))


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
