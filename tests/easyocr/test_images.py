"""Pictures as they are read: turned, transparent, of every mode and of many bits."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from integrations.easyocr import data, images
from integrations.easyocr.data import Skipped, read_any, read_folder
from integrations.easyocr.settings import read_settings
from tests.easyocr.conftest import draw, rows_of, served, write_folder


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


def test_a_picture_over_pillows_limit_is_left_out(monkeypatch):
    source, skipped = rows_of(draw("12"), draw("1212121212")), Skipped()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", draw("12").width * draw("12").height)
    lines = read_any(source, "train", read_settings({})[0], skipped)
    assert [line.row for line in lines.lines] == [0]
    assert skipped.counts == {"corrupt image": 1}
