from __future__ import annotations

import json
from typing import Any

import pytest

from plugins import AccelConfig
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("_alone")
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
