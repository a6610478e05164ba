"""The Reader's three files; the cases 487 and 982."""

from __future__ import annotations

import pytest
import torch
import yaml

from integrations.easyocr import export
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.network import build
from plugins.core.checkpoint.atomic_file import write_atomically

SMALL = {"input_channel": 1, "output_channel": 16, "hidden_size": 8}


def written(folder, characters, name="small_net", features="VGG", height=64):
    model = build(features, len(characters) + 1, SMALL)
    done = export.write(
        folder, name, model.state_dict(), features=features, params=SMALL, height=height, characters=characters,
        lang_list=["en"], writer=write_atomically,
    )  # fmt: skip
    return model, done


@pytest.mark.parametrize(
    "characters", ["abc ", "0123 #x", "1234567890", "'\"\\", " ~", "yes", "null", "é€ \u00a0", ": -"]
)
def test_487_character_sets_read_back_exactly_and_the_reader_loads(tmp_path, characters):
    _, done = written(tmp_path, characters)
    config = yaml.load(done.files[1].read_text(encoding="utf8"), Loader=yaml.FullLoader)
    assert config["character_list"] == characters
    assert "symbols" not in config
    assert done.reader(["en"], detector=False).character == characters


@pytest.mark.parametrize("features", ["VGG", "ResNet"])
def test_982_keys_load_on_the_cpu_reader_and_strictly_into_dataparallel(tmp_path, features):
    model, done = written(tmp_path, "abc", f"net_{features.lower()}", features)
    state = torch.load(done.files[0], weights_only=True)
    torch.nn.DataParallel(build(features, 4, SMALL)).load_state_dict(state)
    assert list(state) == [f"module.{name}" for name in model.state_dict()]
    for name, value in state.items():
        assert value.is_contiguous()
        assert value.dtype == (torch.int64 if name.endswith("num_batches_tracked") else torch.float32)
    reader = done.reader(["en"], detector=False)
    for ours, theirs in zip(model.state_dict().values(), reader.recognizer.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "name", ["test", "a.b", "my-net", "english_g2", "standard", "torch", "sys", "1net", "", "__main__"]
)
def test_names_that_the_reader_cannot_import_are_refused(name):
    with pytest.raises(EasyOCRError, match=f"experiment_name={name!r}"):
        export.check_name(name)


@pytest.mark.parametrize("name", ["arabic", "chinese_sim", "chinese_tra"])
def test_names_that_the_reader_treats_specially_are_refused(name):
    with pytest.raises(EasyOCRError, match=f"experiment_name='{name}': the Reader (turns|decodes)"):
        export.check_name(name)


def test_a_bare_folder_of_that_name_is_no_module(monkeypatch, tmp_path):
    """Such as the experiment's own, where `output` is on Python's path."""
    for name in ("bare_net", "packed_net"):
        (tmp_path / name).mkdir()
    (tmp_path / "packed_net" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EasyOCRError, match=r"another module of that name first \(.*packed_net.__init__\.py\)"):
        export.check_name("packed_net")
    export.check_name("bare_net")
    _, done = written(tmp_path / "bare_net", "abc", "bare_net")
    done.reader(["en"], detector=False)


def test_a_name_too_long_for_its_files_is_refused(tmp_path):
    written(tmp_path, "abc", "n" * 200)
    with pytest.raises(EasyOCRError, match=r"experiment_name=é+…: is 202 bytes long, allowed are 200"):
        export.check_name("é" * 101)


def test_a_name_written_before_may_be_written_again(tmp_path):
    written(tmp_path, "abc", "again_net")
    _, done = written(tmp_path, "abcd", "again_net")
    assert done.reader(["en"], detector=False).character == "abcd"
