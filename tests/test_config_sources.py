from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins import AccelConfig, AccelError
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("_alone")


def test_the_later_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accel.yaml").write_text("accumulate: 2\nclip_norm: 2.0\nema: 0.2\n")
    assert AccelConfig().given() == {"accumulate": 2, "clip_norm": 2.0, "ema": 0.2}
    monkeypatch.setenv("ACCEL_CLIP_NORM", "3.0")
    monkeypatch.setenv("ACCEL_EMA", "0.3")
    assert AccelConfig(ema=0.4).given() == {"accumulate": 2, "clip_norm": 3.0, "ema": 0.4}


def test_a_named_file_takes_the_place_of_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "accel.yaml").write_text("accumulate: 2\n")
    other = tmp_path / "other.yaml"
    other.write_text("ema: 0.5\n")
    assert AccelConfig(other).given() == {"ema": 0.5}
    assert AccelConfig(str(other), ema=0.6).given() == {"ema": 0.6}


@pytest.mark.parametrize("source", ["file", "environment", "arguments"])
def test_each_source_is_checked_alike(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if source == "file":
        (tmp_path / "accel.yaml").write_text("accumulate: 0\n")
    elif source == "environment":
        monkeypatch.setenv("ACCEL_ACCUMULATE", "0")
    message = refusal(**({"accumulate": 0} if source == "arguments" else {}))
    assert message == "accumulate=0: allowed are host, or an integer of at least 1"


def test_environment_of_lists_and_of_unknown_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_BUCKETS", "64,128")
    monkeypatch.setenv("ACCEL_COMPILE_SCOPE", "a.*,b")
    config = AccelConfig()
    assert (config.buckets, config.compile_scope) == ([64, 128], ["a.*", "b"])
    monkeypatch.setenv("ACCEL_BUCKET", "64")
    assert refusal().startswith("ACCEL_BUCKET=64: unknown field; did you mean buckets?")


def test_other_peoples_environment_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AccelConfig().given() == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("compile: on\nclip_norm: off\n", {"compile": "on", "clip_norm": "off"}),
        ("compile: yes\nema: no\n", {"compile": "on", "ema": "off"}),
        ("compile: 'on'\nbuckets: off\n", {"compile": "on", "buckets": "off"}),
        ("lr_scale: off\nplan: off\n", {"lr_scale": "off", "plan": "off"}),
        ("buckets: [128, 64]\n", {"buckets": [64, 128]}),
        ("", {}),
        ("# only a comment\n", {}),
        ("\ufeffaccumulate: 4\n", {"accumulate": 4}),
        ("accumulate: 4\r\nema: 0.5\r\n", {"accumulate": 4, "ema": 0.5}),
    ],
)
def test_yaml_as_people_write_it(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(text.encode())
    assert AccelConfig(path).given() == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- accumulate\n", "holds list, expected a mapping"),
        (b"accumulate: [1\n", "not readable as YAML"),
        (b"\xff\xfe\x00", "not readable as YAML"),
        (b"accumulate: 1\nacumulate: 2\n", "did you mean accumulate?"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    message = refusal(path)
    assert words in message
    assert "my.yaml" in message or "unknown field" in message


def test_a_file_that_is_not_there() -> None:
    assert refusal("no.yaml").startswith("config=no.yaml: no such file")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("accumulate: 1\n")

    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    assert "Permission denied" in refusal(path)


def test_errors_are_one_line_whatever_goes_in() -> None:
    assert str(AccelError("a\n  b\tc")) == "a b c"
    assert "\n" not in refusal(compile="on\noff")


def test_a_path_from_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = AccelConfig(cache_dir="~/cache", plan="~/plan.json")
    assert (made.cache_dir, made.plan) == (tmp_path / "cache", tmp_path / "plan.json")
    assert AccelConfig(cache_dir="~nobody-of-this-name/x").cache_dir == Path("~nobody-of-this-name/x")


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CONFIG", "")
    assert AccelConfig().given() == {}


@pytest.mark.parametrize("config", [{"ema": 0.9}, 5])
def test_fields_in_the_place_of_a_file(config: Any) -> None:
    with pytest.raises(AccelError, match="expected the path of a YAML file; fields go by name"):
        AccelConfig(config)


def test_fields_that_pydantic_takes_for_itself_are_unknown_here(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    for name in ("_env_file", "_cli_parse_args", "_secrets_dir", "self", "model_config"):
        path.write_text(f"{name}: true\n")
        assert refusal(path).startswith(f"{name}=True: unknown field")
        assert refusal(**{name: 1}).startswith(f"{name}=1: unknown field")


@pytest.mark.parametrize(
    "text",
    ["a: 2020-13-45\n", "a: !!int x\n", "a: !!timestamp x\n", "a: !!bool x\n", "[" * 5000, f"a: {'9' * 5000}\n"],
)
def test_a_value_that_yaml_trips_over_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert "not readable as YAML" in refusal(path)


def test_values_too_long_to_show_are_cut(tmp_path: Path) -> None:
    assert len(refusal(ema="x" * 10**6)) < 2000
    assert "an integer of 16610 bits" in refusal(recompile_budget=-(10**5000))
    assert "File name too long" in refusal("x" * 5000)


def test_a_path_with_a_null_character() -> None:
    for name in ("plan", "cache_dir"):
        assert refusal(**{name: "a\0b"}).startswith(f"{name}=")
