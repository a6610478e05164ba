"""The Reader on an exported network: its detector, and others beside it; reports 825, 1332."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import easyocr
import easyocr.config
import numpy as np
import pytest
import torch

from integrations.easyocr import reader as readers
from integrations.easyocr.errors import EasyOCRError
from plugins.core.checkpoint.atomic_file import write_atomically
from tests.easyocr.test_export import written

PAGE = np.full((64, 200), 255, np.uint8)


@pytest.fixture
def craft(stock):
    return stock.with_name("craft_mlt_25k.pth")


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """EasyOCR's own folder of networks, empty."""
    folder = tmp_path / "home" / "model"
    folder.mkdir(parents=True)
    monkeypatch.setattr(easyocr.config, "MODULE_PATH", str(tmp_path / "home"))
    for name in ("EASYOCR_MODULE_PATH", "MODULE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    return folder


def test_the_reader_is_found_from_another_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, done = written(Path("run"), "abc")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert done.reader(["en"], detector=False) is not None


@pytest.mark.parametrize("kept", ["storage", "EASYOCR_MODULE_PATH", "MODULE_PATH", "home", "given", "beside"])
def test_825_the_detector_is_found_where_easyocr_keeps_it(tmp_path, monkeypatch, storage, craft, kept):
    _, done = written(tmp_path / "run", "abc")
    folder = storage if kept == "storage" else tmp_path / kept / "model"
    if kept.endswith("PATH"):
        monkeypatch.setenv(kept, str(folder.parent))
    if kept == "home":
        folder = tmp_path / "nobody" / ".EasyOCR" / "model"
    if kept == "beside":
        folder = done.model_storage_directory
    folder.mkdir(parents=True, exist_ok=True)
    (folder / craft.name).symlink_to(craft)
    before = sorted(done.model_storage_directory.iterdir())
    options = {"model_storage_directory": folder} if kept == "given" else {}
    monkeypatch.setattr(easyocr.Reader, "initDetector", lambda self, path: path)
    opened = done.reader(["en"], **options)
    assert opened.detector.endswith(craft.name)
    assert sorted(done.model_storage_directory.iterdir()) == before  # such a folder may be read-only


def test_1332_a_page_is_read_with_the_detector(tmp_path, storage, craft):
    (storage / craft.name).symlink_to(craft)
    _, done = written(tmp_path / "run", "abc")
    assert done.reader(["en"]).readtext(PAGE) == []


def test_a_detector_that_is_nowhere_is_one_line(tmp_path, storage, craft):
    _, done = written(tmp_path / "run", "abc")
    with pytest.raises(EasyOCRError, match=r"craft_mlt_25k.pth: not found in .*download_enabled=True") as error:
        done.reader(["en"])
    assert str(storage) in str(error.value)
    (storage / craft.name).write_bytes(b"half a file")
    with pytest.raises(EasyOCRError, match=r"the one in .* is damaged"):
        done.reader(["en"])
    assert done.reader(["en"], detector=False).recognizer is not None


def test_the_detector_is_placed_beside_the_network_for_a_bare_reader(tmp_path, storage, craft, monkeypatch):
    _, done = written(tmp_path / "run", "abc")
    readers.place_detector(done, [], write_atomically)
    assert not (done.model_storage_directory / craft.name).exists()
    assert any("detector" in remark for remark in done.remarks())
    (storage / craft.name).symlink_to(craft)
    readers.place_detector(done, [], write_atomically)
    assert not done.remarks()
    monkeypatch.setattr(easyocr.Reader, "initDetector", lambda self, path: path)
    opened = eval(done.source(["en"])[:-1] + ", gpu=False, verbose=False, download_enabled=False)")
    assert opened.detector.startswith(str(done.model_storage_directory))
    sys.path.remove(str(done.user_network_directory))


@pytest.fixture
def two(tmp_path):
    """Two networks of one name: another extractor, another height."""
    return (
        written(tmp_path / "a", "abc", "twin_net", "VGG", height=32),
        written(tmp_path / "b", "abcdef", "twin_net", "ResNet", height=64),
    )


def test_two_results_of_one_name_are_two_networks(two):
    paths = list(sys.path)
    opened = [done.reader(["en"], detector=False) for _, done in two]
    for (model, _), one in zip(two, opened, strict=True):
        for ours, theirs in zip(model.state_dict().values(), one.recognizer.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
    assert "twin_net" not in sys.modules
    assert sys.path == paths


def test_every_reader_keeps_its_own_height(two, monkeypatch):
    heights = []

    def seen(model, images, text):
        heights.append(images.shape[2])
        return torch.zeros(1, 4, model.classes)

    opened = [done.reader(["en"], detector=False) for _, done in two]
    for one, classes in zip(opened, (4, 7), strict=True):
        one.recognizer.classes = classes
        monkeypatch.setattr(type(one.recognizer), "forward", seen)
    for one in (*opened, *opened):
        one.recognize(PAGE)
    # An empty reading is looked at twice.
    assert heights == [32, 32, 64, 64] * 2
    assert easyocr.easyocr.imgH == 64  # EasyOCR's own


def test_a_reader_is_copied_and_sent(two):
    first = two[0][1].reader(["en"], detector=False)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other.character == "abc"
        assert isinstance(other, easyocr.Reader)


def test_882_a_right_to_left_network_gives_texts_as_typed(tmp_path, monkeypatch):
    _, done = written(tmp_path, "אבג Total12", "turned_net")
    opened = replace(done, right_to_left=True).reader(["en"], detector=False)
    monkeypatch.setitem(type(opened).recognize.__globals__, "get_text", lambda *a: [([], "Total 12 גבא", 0.9)])
    assert opened.recognize(PAGE, detail=0) == ["אבג Total 12"]
    assert "model_lang = 'arabic'" in " ".join(replace(done, right_to_left=True).remarks())
