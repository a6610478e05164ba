"""Continuing from weights; the case 1423."""

from __future__ import annotations

import pytest
import torch

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.network import build, read
from integrations.easyocr.weights import load_state, take_over
from tests.easyocr.conftest import STOCK_CHARACTERS

STOCK = {"input_channel": 1, "output_channel": 256, "hidden_size": 256}
SMALL = {"input_channel": 1, "output_channel": 16, "hidden_size": 8}


def saved(path, characters, prefix="module.", features="VGG"):
    model = build(features, len(characters) + 1, SMALL)
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, path)
    return model


@torch.no_grad()
def logits(model, images):
    return read(model.eval(), images)


def test_1423_an_added_character_leaves_the_others_logits_unchanged(stock):
    before, grown = STOCK_CHARACTERS, "é" + STOCK_CHARACTERS[:40] + STOCK_CHARACTERS[41:]
    old, new = build("VGG", len(before) + 1, STOCK), build("VGG", len(grown) + 1, STOCK)
    take_over(old, stock, before)
    taken = take_over(new, stock, grown)
    assert (taken.added, taken.dropped) == ("é", before[40])
    assert "added: é" in taken.sentence("english_g2.pth")
    images = torch.rand(2, 1, 64, 128) * 2 - 1
    was, now = logits(old, images), logits(new, images)
    assert torch.equal(was[..., 0], now[..., 0])
    shared = [c for c in before if c in grown]
    assert torch.equal(was[..., [before.index(c) + 1 for c in shared]], now[..., [grown.index(c) + 1 for c in shared]])


@pytest.mark.parametrize("prefix", ["module.", ""])
@pytest.mark.parametrize("features", ["VGG", "ResNet"])
def test_both_generations_and_both_key_forms(tmp_path, prefix, features):
    right = saved(tmp_path / "w.pth", "abc", prefix, features)
    model = build(features, 4, SMALL)
    take_over(model, tmp_path / "w.pth", "abc")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), right.state_dict().values(), strict=True))


def test_new_prediction_starts_the_head_anew_and_keeps_the_rest(tmp_path):
    right = saved(tmp_path / "w.pth", "abc")
    model = build("VGG", 6, SMALL)
    head = model.Prediction.weight.clone()
    take_over(model, tmp_path / "w.pth", "abcde", fresh_head=True)
    assert torch.equal(model.Prediction.weight, head)
    assert torch.equal(model.SequenceModeling[1].linear.weight, right.SequenceModeling[1].linear.weight)


def test_ft_takes_over_what_fits(tmp_path):
    saved(tmp_path / "w.pth", "abc")
    state = torch.load(tmp_path / "w.pth", weights_only=True)
    del state["module.SequenceModeling.0.linear.bias"]
    torch.save({**state, "module.extra": torch.zeros(1)}, tmp_path / "part.pth")
    model = build("VGG", 4, SMALL)
    with pytest.raises(EasyOCRError, match=r"1 parameters missing .* 1 unexpected .*FT: True"):
        take_over(model, tmp_path / "part.pth", "abc")
    taken = take_over(model, tmp_path / "part.pth", "abc", partial=True)
    assert taken.missing == ("SequenceModeling.0.linear.bias",)
    assert taken.unexpected == ("extra",)


def test_the_character_set_of_an_official_checkpoint_must_be_told(tmp_path):
    saved(tmp_path / "w.pth", "abc")
    model = build("VGG", 5, SMALL)
    with pytest.raises(EasyOCRError, match=r"it has 3 characters and the configuration 4.*saved_characters"):
        take_over(model, tmp_path / "w.pth", "abcd")
    assert take_over(model, tmp_path / "w.pth", "abcd", given="abc").added == "d"
    with pytest.raises(EasyOCRError, match="its character set holds 2"):
        take_over(model, tmp_path / "w.pth", "abcd", given="ab")


def test_another_architecture_is_one_clear_line(tmp_path, stock):
    with pytest.raises(EasyOCRError, match=r"another architecture: .* check FeatureExtraction"):
        take_over(build("VGG", 97, {**STOCK, "output_channel": 128}), stock, STOCK_CHARACTERS)
    with pytest.raises(EasyOCRError, match=r"another architecture: .*hidden_size"):
        take_over(build("VGG", 4, {**STOCK, "hidden_size": 8}), stock, "abc")
    torch.save({"backbone.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(EasyOCRError, match=r"other.pth: another architecture: it holds backbone.weight"):
        take_over(build("VGG", 4, SMALL), tmp_path / "other.pth", "abc")


def test_files_that_are_no_weights(tmp_path):
    with pytest.raises(EasyOCRError, match="no such file"):
        load_state(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(EasyOCRError, match=r"text.pth: not readable as weights"):
        load_state(tmp_path / "text.pth")
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(EasyOCRError, match="expected a flat mapping"):
        load_state(tmp_path / "list.pth")
