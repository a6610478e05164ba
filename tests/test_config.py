from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugins import AccelConfig, AccelError

DEFAULTS = {
    "compile": "auto",
    "compile_mode": "default",
    "compile_scope": "auto",
    "compile_exclude": [],
    "dynamic": "auto",
    "buckets": "auto",
    "plan": "auto",
    "recompile_budget": 8,
    "accumulate": "host",
    "effective_batch": "host",
    "normalise": "exact",
    "clip_norm": "host",
    "ema": "host",
    "batchnorm": "host",
    "precision": "host",
    "memory_format": "auto",
    "lr_scale": "off",
    "checkpointing": "off",
    "validate": "eager",
    "nonfinite": "skip",
    "cache_dir": "auto",
    "seed": "host",
}
# Every other value that a field allows, and some that it does not.
ALLOWED: dict[str, list[Any]] = {
    "checkpointing": ["auto", "on"],
    "compile": ["on", "off"],
    "compile_mode": ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    "compile_backend": ["aot_eager", "eager"],
    "compile_scope": ["whole", "regional", ["model.*"]],
    "dynamic": ["mark", "static"],
    "buckets": ["off", [64, 128]],
    "plan": ["off", "plan.json"],
    "recompile_budget": [1, 100],
    "accumulate": [1, 64],
    "effective_batch": [1, 64],
    "normalise": ["host"],
    "clip_norm": ["off", 0.1, 10],
    "ema": ["off", 0.5, 0.9999],
    "batchnorm": ["momentum", "precise", "freeze"],
    "precision": ["auto", "fp32", "bf16", "fp16"],
    "memory_format": ["host", "channels_last"],
    "lr_scale": ["sqrt", "linear"],
    "validate": ["compiled"],
    "nonfinite": ["stop"],
    "cache_dir": ["cache"],
    "seed": [0, 7],
}
REFUSED: dict[str, list[Any]] = {
    "compile": ["maybe", 1, None],
    "compile_mode": ["fast"],
    "dynamic": ["on", True],
    "buckets": ["64,wide", [0], [-1, 64], 64.5],
    "recompile_budget": [0, -1, "many", 1.5],
    "accumulate": [0, -2, 2.5, "four", True, None],
    "effective_batch": [0, "big"],
    "normalise": ["off"],
    "clip_norm": [0, -1, "inf", float("nan"), "none"],
    "ema": [0, 1, 1.5, -0.1, "on", float("nan")],
    "batchnorm": ["frozen"],
    "precision": ["fp8", 16],
    "memory_format": ["nchw"],
    "lr_scale": ["on", True],
    "validate": ["on"],
    "nonfinite": ["ignore"],
    "seed": [-1, "random"],
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(AccelError) as caught:
        AccelConfig(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_table() -> None:
    dumped = AccelConfig().dump()
    assert {name: dumped[name] for name in DEFAULTS} == DEFAULTS
    assert set(dumped) == {*DEFAULTS, "compile_backend"}
    assert dumped["compile_backend"] == "inductor"


def test_every_default_passes_its_own_check() -> None:
    assert AccelConfig(**AccelConfig().dump()).dump() == AccelConfig().dump()


def test_every_field_is_described() -> None:
    for field in AccelConfig.model_fields.values():
        assert field.description
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["allowed"]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in ALLOWED.items() for v in values])
def test_values_that_a_field_allows(name: str, value: Any) -> None:
    for given in (value, str(value)) if isinstance(value, (int, float, str)) else (value,):
        config = AccelConfig(**{name: given})
        assert config.dump()[name] == value
        assert config.given() == {name: value}
        json.dumps(config.dump())


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in REFUSED.items() for v in values])
def test_values_that_a_field_refuses(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name}=")
    allowed = next(
        f.json_schema_extra["allowed"] for n, f in AccelConfig.model_fields.items() if (f.alias or n) == name
    )
    assert message.endswith(f"allowed are {allowed}")


def test_an_unknown_field_is_named_with_the_nearest_and_all() -> None:
    message = refusal(clipnorm=1)
    assert message.startswith("clipnorm=1: unknown field; did you mean clip_norm?")
    assert all(name in message for name in DEFAULTS)
    assert "did you mean" not in refusal(zzz=1)
    assert "unknown field" in refusal(validate_="eager")


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 4, "effective_batch": 64}, {"compile": "off", "validate": "compiled"}],
)
def test_contradictions_name_both_fields(options: dict[str, Any]) -> None:
    message = refusal(**options)
    assert "contradict" in message
    assert all(f"{name}={value}" in message for name, value in options.items())


def test_given_is_what_was_set_and_no_more() -> None:
    assert AccelConfig().given() == {}
    assert AccelConfig(accumulate="host").given() == {"accumulate": "host"}


# -- lists ---------------------------------------------------------------------


@pytest.mark.parametrize("edges", ["128,64, 64", "[64, 128]", "(128 , 64)", [128, 64], (64, 128, 64)])
def test_edges_are_sorted_and_single(edges: Any) -> None:
    assert AccelConfig(buckets=edges).buckets == [64, 128]


@pytest.mark.parametrize("patterns", ["model.0.*,model.1", "[model.0.*, model.1]", ["model.0.*", "model.1"]])
def test_patterns(patterns: Any) -> None:
    config = AccelConfig(compile_scope=patterns, compile_exclude=patterns)
    assert config.compile_scope == config.compile_exclude == ["model.0.*", "model.1"]


# -- sources ---------------------------------------------------------------------


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

    monkeypatch.setattr(Path, "read_text", denied)
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
