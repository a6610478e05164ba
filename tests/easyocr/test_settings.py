from __future__ import annotations

import pytest

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import read_settings

OFFICIAL = """
number: '0123456789'
symbol: "!\\"#$%&'()*+,-./:;<=>?@[\\\\]^_`{|}~ €"
lang_char: 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'
experiment_name: 'en_filtered'
train_data: 'all_data'
valid_data: 'all_data/en_val'
manualSeed: 1111
workers: 6
batch_size: 32 #32
num_iter: 300000
valInterval: 20000
saved_model: ''
FT: False
optim: False # default is Adadelta
lr: 1.
beta1: 0.9
rho: 0.95
eps: 1e-8
grad_clip: 5
select_data: 'en_train_filtered'
batch_ratio: '1'
total_data_usage_ratio: 1.0
batch_max_length: 34
imgH: 64
imgW: 600
rgb: False
contrast_adjust: False
sensitive: True
PAD: True
contrast_adjust: 0.0
data_filtering_off: False
Transformation: 'None'
FeatureExtraction: 'VGG'
SequenceModeling: 'BiLSTM'
Prediction: 'CTC'
num_fiducial: 20
input_channel: 1
output_channel: 256
hidden_size: 256
decode: 'greedy'
new_prediction: False
freeze_FeatureFxtraction: False
freeze_SequenceModeling: False
"""


def test_the_official_yaml_is_taken_unchanged(tmp_path):
    path = tmp_path / "en.yaml"
    path.write_text(OFFICIAL, encoding="utf-8")
    settings, accel = read_settings(path)
    assert accel == {}
    assert settings.eps == 1e-8  # YAML 1.1 reads it as text
    assert settings.optim == "adadelta"
    assert settings.select_data == ["en_train_filtered"]
    assert settings.batch_ratio == [1.0]
    assert settings.contrast_adjust == 0.0
    assert settings.symbol == "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €"
    assert (
        len({line.split(":")[0] for line in OFFICIAL.splitlines() if ":" in line}) == 42
    )  # contrast_adjust stands twice


def test_either_spelling_of_the_freeze_key():
    for key in ("freeze_FeatureFxtraction", "freeze_FeatureExtraction"):
        assert read_settings({key: True})[0].freeze_FeatureExtraction


def test_characters_are_taken_as_written(tmp_path):
    path = tmp_path / "en.yaml"
    path.write_text("number: 01234567\nsymbol: \nlang_char: yes\n", encoding="utf-8")
    settings, _ = read_settings(path)
    assert (settings.number, settings.symbol, settings.lang_char) == ("01234567", "", "yes")


def test_a_slip_is_answered_with_what_the_caller_takes_too(tmp_path):
    with pytest.raises(EasyOCRError, match=r"^precison='bf16': unknown key; did you mean precision\?"):
        read_settings({}, ["precision"], precison="bf16")
    with pytest.raises(EasyOCRError, match=r"^accel\.precision='bf16': unknown key; did you mean precision\?"):
        read_settings({}, ["precision"], **{"accel.precision": "bf16"})
    with pytest.raises(EasyOCRError, match="is a folder; expected the official"):
        read_settings(tmp_path)
    (tmp_path / "a.yaml").write_text("lr: -1\n", encoding="utf-8")
    with pytest.raises(EasyOCRError, match=r"a\.yaml: lr=-1"):
        read_settings(tmp_path / "a.yaml", ["precision"], num_iter=3)


def test_languages_as_yaml_writes_them_on_a_command_line():
    for written in ("ru,en", "[ru, en]"):
        assert read_settings({}, lang_list=written)[0].lang_list == ["ru", "en"]


def test_paths_from_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings, _ = read_settings({"output": "~/runs", "saved_model": "~/a.pth", "train_data": "~nobody-of-this-name/x"})
    assert (settings.output, settings.saved_model) == ("/home/me/runs", "/home/me/a.pth")
    assert settings.train_data == "~nobody-of-this-name/x"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("output", "a\0b", "no file has this name"),
        ("Transformation", "TPS", "TPS"),
        ("FeatureExtraction", "RCNN", "RCNN"),
        ("Prediction", "Attn", "Attn"),
        ("rgb", True, "grey"),
        ("input_channel", 3, "grey"),
        ("decode", "wordbeamsearch", "greedy"),
        ("optim", "sgd", "Adadelta"),
        ("lr", 0, "greater than 0"),
        ("manualSeed", 2**63, "less than 9223372036854775808"),
        ("output_channel", 12, "greater than or equal to 16"),
        ("output_channel", 20, "multiple of 8"),
        ("batch_ratio", "0.5-0.5", "give one share a data set"),
        ("PAD", False, "preprocess: official"),
        ("preprocess", "other", "reader, official"),
        ("batch_sise", 3, "did you mean batch_size?"),
        ("number", [1, 2], "[1, 2]: allowed is: text"),
        ("number", {"a": 1}, "allowed is: text"),
        ("symbol", True, "allowed is: text"),
        ("saved_characters", ["a"], "allowed is: text"),
        ("batch_size", True, "True: allowed is: a number"),
        ("workers", False, "allowed is: a number"),
        ("lr", True, "allowed is: a number"),
        ("manualSeed", True, "allowed is: a number"),
        ("contrast_adjust", True, "allowed is: a number"),
        ("input_channel", True, "1 (the Reader"),
        ("sensitive", 3, "3: allowed are True, False"),
        ("FT", [True], "allowed are True, False"),
        ("select_data", {"a": 1}, "{'a': 1}: allowed is: names of folders"),
        ("select_data", [["a"]], "allowed is: names of folders"),
        ("select_data", True, "allowed is: names of folders"),
        ("batch_ratio", {"a": 1}, "allowed is: numbers that add up to 1"),
        ("batch_ratio", True, "allowed is: numbers that add up to 1"),
        ("saved_model", 0, "valid string"),
        ("optim", 0, "Adadelta"),
        ("optim", ["adam"], "Adadelta"),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(key, value, told):
    with pytest.raises(EasyOCRError) as error:
        read_settings({key: value})
    message = str(error.value)
    assert key in message
    assert told in message
    assert "\n" not in message


def test_a_list_of_characters_in_a_file(tmp_path):
    path = tmp_path / "en.yaml"
    path.write_text("number: [1, 2]\n")
    with pytest.raises(EasyOCRError, match=r"en.yaml: number=\['1', '2'\]: allowed is: text"):
        read_settings(path)


@pytest.mark.parametrize(
    ("key", "value", "taken"),
    [
        ("number", 123, "123"),
        ("symbol", None, ""),
        ("select_data", 2024, ["2024"]),
        ("select_data", ["a"], ["a"]),
        ("contrast_adjust", False, 0.0),
        ("eps", "1e-8", 1e-8),
        ("batch_size", "32", 32),
        ("lr", 1, 1.0),
        ("optim", "Adam", "adam"),
        ("saved_model", False, ""),
        ("FT", "False", False),
    ],
)
def test_what_official_files_hold_is_taken(key, value, taken):
    assert getattr(read_settings({key: value})[0], key) == taken


def test_a_file_that_is_missing_or_not_yaml(tmp_path):
    with pytest.raises(EasyOCRError, match="no such file"):
        read_settings(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(EasyOCRError, match="not readable as YAML"):
        read_settings(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(EasyOCRError, match="holds list"):
        read_settings(tmp_path / "list.yaml")


def test_options_are_laid_over_the_file(tmp_path):
    path = tmp_path / "en.yaml"
    path.write_text("batch_size: 8\naccel: {accumulate: 2}\n")
    settings, accel = read_settings(path, batch_size=16)
    assert settings.batch_size == 16
    assert accel == {"accumulate": 2}


@pytest.mark.parametrize(
    "text", ["num_iter: 2024-13-45", "select_data: &a [*a]", f"num_iter: {'9' * 5000}", "number: [", "a: b: c"]
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(EasyOCRError, match="config=") as refused:
        read_settings(path)
    assert "\n" not in str(refused.value)


def test_merged_keys_are_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("<<: {number: '0123'}\nlang_char: ab\n")
    assert read_settings(path)[0].number == "0123"
