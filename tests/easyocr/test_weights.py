"""Continuing from weights; the case 1423."""

from __future__ import annotations

import pytest
import torch

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.network import build, read
from integrations.easyocr.weights import take_over
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


@pytest.mark.parametrize("prefix", ["module.", "", "_orig_mod.module.module."])
@pytest.mark.parametrize("features", ["VGG", "ResNet"])
def test_both_generations_and_both_key_forms(tmp_path, prefix, features):
    right = saved(tmp_path / "w.pth", "abc", prefix, features)
    model = build(features, 4, SMALL)
    take_over(model, tmp_path / "w.pth", "abc", given="abc")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), right.state_dict().values(), strict=True))


def test_a_state_dict_inside_a_checkpoint_and_a_compiled_part(tmp_path):
    right = saved(tmp_path / "w.pth", "abc")
    state = torch.load(tmp_path / "w.pth", weights_only=True)
    state = {name.replace("FeatureExtraction.", "FeatureExtraction._orig_mod."): v for name, v in state.items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pth")
    model = build("VGG", 4, SMALL)
    take_over(model, tmp_path / "checkpoint.pth", "abc", given="abc")
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
        take_over(model, tmp_path / "part.pth", "abc", given="abc")
    taken = take_over(model, tmp_path / "part.pth", "abc", given="abc", partial=True)
    assert taken.missing == ("SequenceModeling.0.linear.bias",)
    assert taken.unexpected == ("extra",)


def test_the_character_set_of_a_lone_file_must_be_told(tmp_path):
    saved(tmp_path / "w.pth", "abc")
    for characters in ("abcd", "cba"):  # as many characters are no sign of the same ones
        with pytest.raises(EasyOCRError, match=r"nothing beside it tells its 3 characters .*saved_characters"):
            take_over(build("VGG", len(characters) + 1, SMALL), tmp_path / "w.pth", characters)
    model = build("VGG", 5, SMALL)
    assert take_over(model, tmp_path / "w.pth", "abcd", given="abc").added == "d"
    with pytest.raises(EasyOCRError, match="its character set holds 2"):
        take_over(model, tmp_path / "w.pth", "abcd", given="ab")


def rows_of(path, characters="cba"):
    """The prediction layer's rows after `path` was taken over, blank first."""
    model = build("VGG", len(characters) + 1, SMALL)
    take_over(model, path, characters)
    return model.Prediction.weight


def test_a_checkpoint_to_resume_from_tells_its_characters_and_gives_its_average(tmp_path):
    live, average = (build("VGG", 4, SMALL).state_dict() for _ in range(2))
    last = {"model": live, "average": {}, "extra": {"characters": "abc"}}
    torch.save(last, tmp_path / "last.pt")
    assert torch.equal(rows_of(tmp_path / "last.pt"), live["Prediction.weight"][[0, 3, 2, 1]])
    torch.save({**last, "average": {"updates": 3, "shadow": average}}, tmp_path / "last.pt")
    assert torch.equal(rows_of(tmp_path / "last.pt"), average["Prediction.weight"][[0, 3, 2, 1]])


@pytest.mark.parametrize("teller", ["last.pt", "user_network", "opt.txt"])
def test_the_best_weights_of_an_experiment_go_by_its_characters(tmp_path, teller):
    model = saved(tmp_path / "best_accuracy.pth", "ab ")
    if teller == "last.pt":
        torch.save({"model": model.state_dict(), "extra": {"characters": "ab "}}, tmp_path / "last.pt")
    elif teller == "opt.txt":
        (tmp_path / "opt.txt").write_text("character: x\n------\nlr: 1\ncharacter: ab \nnum_class: 4\n")
    else:
        (tmp_path / "user_network").mkdir()
        (tmp_path / "user_network" / f"{tmp_path.name}.yaml").write_text("character_list: 'ab '\n")
    assert torch.equal(rows_of(tmp_path / "best_accuracy.pth", " ba"), model.Prediction.weight[[0, 3, 2, 1]])


def test_another_architecture_is_one_clear_line(tmp_path, stock):
    with pytest.raises(EasyOCRError, match=r"another architecture: .* check FeatureExtraction"):
        take_over(build("VGG", 97, {**STOCK, "output_channel": 128}), stock, STOCK_CHARACTERS)
    with pytest.raises(EasyOCRError, match=r"another architecture: .*hidden_size"):
        take_over(build("VGG", 4, {**STOCK, "hidden_size": 8}), stock, "abc")
    torch.save({"backbone.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(EasyOCRError, match=r"other.pth: another architecture: it holds backbone.weight"):
        take_over(build("VGG", 4, SMALL), tmp_path / "other.pth", "abc")


def refusal(path, **options):
    with pytest.raises(EasyOCRError) as error:
        take_over(build("VGG", 4, SMALL), path, "abc", **{"given": "abc", **options})
    message = str(error.value)
    assert str(path.parent) in message
    assert not {"\n", "\x1b"} & set(message)
    return message


def test_files_that_are_no_weights(tmp_path):
    path = tmp_path / "w.pth"
    assert "no such file" in refusal(path)
    for content in (b"", b"hello", b"hello world\n"):
        path.write_bytes(content)
        assert "not readable as weights: empty, or no file of torch" in refusal(path)
    torch.save(torch.nn.Linear(2, 2), path)
    assert refusal(path).endswith(
        "Unsupported global: GLOBAL torch.nn.modules.linear.Linear was not an allowed global by default"
    )
    path.write_bytes(path.read_bytes()[:600])
    assert refusal(path).endswith("failed finding central directory")
    torch.save([1], path)
    assert "expected a flat mapping" in refusal(path)


def test_weights_that_no_network_can_hold(tmp_path):
    path = tmp_path / "w.pth"
    saved(path, "abc")
    state = torch.load(path, weights_only=True)
    torch.save({**state, "module.Prediction.bias": torch.full((4,), float("nan"))}, path)
    assert "Prediction.bias holds values that are not finite" in refusal(path)
    torch.save({**state, "module.Prediction.weight": torch.tensor(3.0)}, path)
    assert "Prediction.weight is [] and Prediction.bias [4]" in refusal(path)
    for part in ("weight", "bias"):
        torch.save({name: value for name, value in state.items() if name != f"module.Prediction.{part}"}, path)
        assert "missing" in refusal(path, partial=True)


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe", b"a: !!python/name:os.system x"])
def test_a_damaged_yaml_beside_the_weights(tmp_path, content):
    saved(tmp_path / "w.pth", "abc")
    (tmp_path / "w.yaml").write_bytes(content)
    assert "w.yaml: not readable as YAML" in refusal(tmp_path / "w.pth", given="")


def test_the_file_is_read_once(tmp_path, monkeypatch):
    right, read_files, load = saved(tmp_path / "w.pth", "abc"), [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **how: read_files.append(path) or load(path, **how))
    torch.save({"model": right.state_dict(), "extra": {"characters": "abc"}}, tmp_path / "w.pth")
    take_over(build("VGG", 4, SMALL), tmp_path / "w.pth", "abc")
    assert read_files == [tmp_path / "w.pth"]
