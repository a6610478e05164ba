"""Random settings, files and command lines as people and machines get them wrong, for the counts in BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from plugins import AccelConfig

NAMES = [field.alias or name for name, field in AccelConfig.model_fields.items()]
WORDS = [
    "auto", "on", "off", "host", "fp32", "bf16", "fp16", "exact", "freeze", "momentum", "precise", "whole", "regional",
    "eager", "compiled", "skip", "stop", "sqrt", "linear", "channels_last", "mark", "static", "True", "None", "null",
    "", " ", "~", "~/x", "nan", "inf", "-inf", "1e400", "0x10", "1_0", "2020-13-45", "a\0b", "../..", "[1,2]", "1,2,3",
    "{}", "[", "\ud800", "é", "١", "a" * 300, "-1", "0", "1", "64", "0.5", "1.0", "1e-320", "9" * 30, "9" * 500,
]  # fmt: skip
NUMBERS = st.integers() | st.floats() | st.integers(-3, 300) | st.sampled_from([2**63, 10**400])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS) | st.text(max_size=20) | st.binary(max_size=8)
NESTED: SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
SLIPS = ["acumulate", "_env_file", "_cli_parse_args", "_case_sensitive", "self", "validate_", "config", "model_config",
         "__class__", "", "compile ", "COMPILE", "given"]  # fmt: skip
MISSPELT = st.sampled_from([*NAMES, *SLIPS]) | st.text(max_size=12)


def allowed(name: str) -> SearchStrategy[Any]:
    """Mostly values that this field allows, as text or as they are."""
    field = next(field for key, field in AccelConfig.model_fields.items() if (field.alias or key) == name)
    words = [word.strip() for word in str((field.json_schema_extra or {})["allowed"]).split(",")]  # type: ignore[index,call-overload]
    if name == "compile_backend":
        words = ["eager", "inductor", "aot_eager"]
    good = [word for word in words if " " not in word]
    return st.sampled_from([*good, 1, 2, "3", 0.5, "0.25"])


SETTINGS = st.lists(
    st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), allowed(name) | allowed(name) | NESTED))
    | st.tuples(MISSPELT, NESTED),
    max_size=4,
).map(dict)
ALLOWED_SETTINGS = st.lists(
    st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), allowed(name))), max_size=4
).map(dict)


@st.composite
def damaged(draw: Callable[..., Any], clean: SearchStrategy[bytes]) -> bytes:
    """Bytes as they are, or cut off, with a part twice, or with some bytes exchanged."""
    data = draw(clean)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data = draw(
            st.sampled_from([data[:at], data[:at] + data, data[at:]])
            | st.binary(min_size=1, max_size=4).map(
                lambda new, at=at, data=data: data[:at] + new + data[at + len(new) :]
            )
        )
    return data


def _as_yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, ValueError):
        return repr(value).encode("utf-8", "surrogatepass")


def yaml_files(values: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    """Files of these values, whole or damaged, and text that is no file of values."""
    return damaged(values.map(_as_yaml) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))


def tried(count: int, strategy: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Run `check` on `count` random examples; the first that fails is made small and shown."""

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def run(example: Any) -> None:
        check(example)

    run()


def sizes(quick: int, long: int) -> pytest.MarkDecorator:
    """The same test with a few examples, and with many: `make test-long`."""
    return pytest.mark.parametrize("count", [quick, pytest.param(long, marks=pytest.mark.long)])
