"""Validation reads as the Reader does; the case 1104."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from examples.render_lines import text
from integrations.easyocr import export
from integrations.easyocr.data import Skipped, read_folder
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.labels import converter
from integrations.easyocr.network import build
from integrations.easyocr.preprocess import Preprocess
from integrations.easyocr.reading import read_lines
from integrations.easyocr.weights import take_over
from plugins.core.checkpoint.atomic_file import write_atomically
from tests.easyocr.conftest import STOCK_CHARACTERS, write_folder

FONTS = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "DejaVuSansMono-Bold", "cmtt10")
STOCK = {"input_channel": 1, "output_channel": 256, "hidden_size": 256}


@pytest.fixture
def network(stock):
    model = build("VGG", 97, STOCK)
    take_over(model, stock, STOCK_CHARACTERS)
    return model


@pytest.fixture
def held_out(tmp_path):
    """Lines of two fonts, faint ones, a tall picture and noise: what the Reader doubts as well as what it reads."""
    rng = np.random.default_rng(4)
    folder = write_folder(tmp_path / "x", [text(rng) for _ in range(24)], font="cmtt10")
    grey = np.asarray(Image.open(folder / "0.png"))
    faint = (128 + (grey.astype(float) - 128) * 0.06).astype(np.uint8)
    odd = {"faint": faint, "tall": grey.T, "noise": rng.integers(0, 255, (40, 170), dtype=np.uint8)}
    with (folder / "labels.csv").open("a", encoding="utf-8") as file:
        for name, picture in odd.items():
            Image.fromarray(picture).save(folder / f"{name}.png")
            file.write(f"{name}.png,x\n")
    return read_folder(folder, "x", Skipped())


def test_1104_the_reader_gives_the_trainers_text(network, held_out, tmp_path):
    done = export.write(
        tmp_path, "skew_net", network.state_dict(), features="VGG", params=STOCK, height=64,
        characters=STOCK_CHARACTERS, lang_list=["en"], writer=write_atomically,
    )  # fmt: skip
    reader = done.reader(["en"], detector=False)
    for decode in ("greedy", "beamsearch"):
        ours = read_lines(
            network, held_out, Preprocess("reader", 64, 600), converter(STOCK_CHARACTERS), torch.device("cpu"),
            decode=decode,
        )  # fmt: skip
        for index, text_read, confidence in zip(ours.indices, ours.texts, ours.confidences, strict=True):
            (_, theirs, sure) = reader.recognize(str(held_out.lines[index].path), decoder=decode)[0]
            assert text_read == theirs
            assert abs(confidence - sure) < 1e-3
    assert network.training


def test_a_crop_padded_to_the_next_bucket_reads_the_same(network, tmp_path):
    """At least 99 % of lines in five fonts; 495 of 500 when that many were measured."""
    rng = np.random.default_rng(4)
    for seed, font in enumerate(FONTS):
        write_folder(tmp_path / font, [text(rng) for _ in range(44)], seed=1000 * seed, font=font)
    lines = read_folder(tmp_path, "x", Skipped())
    codec, reader_way = converter(STOCK_CHARACTERS), Preprocess("reader", 64, 600)
    plain = read_lines(network, lines, reader_way, codec, torch.device("cpu"))
    wider = read_lines(network, lines, reader_way, codec, torch.device("cpu"), widen=lambda width: width + 64)
    assert len(plain.texts) == 220
    assert sum(a == b for a, b in zip(plain.texts, wider.texts, strict=True)) >= 0.99 * 220
    assert plain.loss > 0
    assert len(plain.samples(lines, 3)) == 3


def test_lost_pictures_are_named_and_nothing_left_to_read_is_told(tmp_path):
    folder = write_folder(tmp_path / "x", ["1", "2", "3"])
    lines = read_folder(folder, "valid_data", Skipped())
    model, way = build("VGG", 4, {**STOCK, "output_channel": 16, "hidden_size": 8}), Preprocess("reader", 32, 600)
    (folder / "0.png").unlink()
    (folder / "1.png").write_bytes(b"no picture")
    found = read_lines(model, lines, way, converter("123"), torch.device("cpu"))
    assert found.labels == ["3"]
    assert sorted(found.unreadable) == [str(folder / "0.png"), str(folder / "1.png")]
    (folder / "2.png").unlink()
    with pytest.raises(EasyOCRError, match=r"^valid_data: none of its pictures can be decoded, such as .*\.png$"):
        read_lines(model, lines, way, converter("123"), torch.device("cpu"))
    assert model.training
