"""AccelConfig: every setting with its unit, default and check.

Sources, the later wins: defaults, `accel.yaml` (or the file named by `config`), `ACCEL_*` environment
variables, arguments. An unknown field, a value out of range or two contradicting fields raise `AccelError`,
one line that names the field, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from plugins.errors import AccelError
from plugins.trial_run import request as trial

ENV_PREFIX = "ACCEL_"
CONFIG_VARIABLE = "ACCEL_CONFIG"  # names the file, as `config` does
DEFAULT_FILE = "accel.yaml"
WORDS = ("auto", "on", "off", "host")  # in any case; other words are names and paths


def _word(value: Any) -> Any:
    """YAML 1.1 reads `on` and `off` as booleans; here they are words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, str):
        return value
    word = value.strip()
    return {"true": "on", "false": "off"}.get(word.lower(), word.lower() if word.lower() in WORDS else word)


def _edges(value: Any) -> Any:
    """Bucket edges: a list, or a comma-separated string; returned sorted, each edge once."""
    value = _word(value)
    if isinstance(value, str) and value not in {"auto", "off"}:
        value = [part for part in value.strip("[]() ").split(",") if part.strip()]
    if isinstance(value, (list, tuple, set)):
        return sorted({int(str(edge)) for edge in value})
    return value


def _patterns(value: Any) -> Any:
    """Name patterns (fnmatch): a list, or a comma-separated string."""
    if isinstance(value, str) and value not in {"auto", "whole", "regional"}:
        return [part.strip() for part in value.strip("[]() ").split(",") if part.strip()]
    return list(value) if isinstance(value, tuple) else value


def _home(value: Any) -> Any:
    """`~` is the user's home, as in a shell; an unknown `~user` stays as it is."""
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value  # noqa: PTH111 - Path's own raises


Word = BeforeValidator(_word)
Home = AfterValidator(_home)
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(gt=0, lt=1)]


def _field(default: Any, allowed: str, description: str) -> Any:
    return Field(default, description=description, json_schema_extra={"allowed": allowed})


class AccelConfig(BaseSettings):
    """Settings of every plug. Defaults leave the run as its host would run it, made exact and safe.

    Args:
        config: a YAML file of fields; default: the one that `ACCEL_CONFIG` names, or `accel.yaml` where there is one.
        **options: the fields; they win over the environment, and that over the file.

    Raises:
        AccelError: an unknown field, a value out of range or two fields that contradict; one line.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", validate_default=False, case_sensitive=False
    )

    compile: Annotated[Literal["auto", "on", "off"], Word] = _field(
        "auto", "auto, on, off", "torch.compile; auto keeps it only if it is measured to pay within this run"
    )
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], Word
    ] = _field(
        "default",
        "default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs",
        "mode, as torch names it",
    )
    compile_backend: Annotated[str, Word] = _field(
        "inductor", "a torch.compile backend such as inductor, aot_eager, eager", "torch.compile backend"
    )
    compile_scope: Annotated[Literal["auto", "whole", "regional"] | list[str], BeforeValidator(_patterns), NoDecode] = (
        _field("auto", "auto, whole, regional, or name patterns", "what is compiled")
    )
    compile_exclude: Annotated[list[str], BeforeValidator(_patterns), NoDecode] = _field(
        [], "name patterns", "modules that stay eager"
    )
    dynamic: Annotated[Literal["auto", "mark", "static"], Word] = _field(
        "auto", "auto, mark, static", "how width and length dimensions are given to the compiler"
    )
    buckets: Annotated[Literal["auto", "off"] | list[PositiveInt], BeforeValidator(_edges), NoDecode] = _field(
        "auto", "auto, off, or edges as integers of at least 1 (px or tokens)", "padding targets"
    )
    plan: Annotated[Literal["auto", "off"] | Path, Word, Home] = _field(
        "auto", "auto, off, or a file", "measured choice of compile, precision and memory format"
    )
    recompile_budget: PositiveInt = _field(
        8, "an integer of at least 1", "graphs a run may build; past it the run goes on eagerly"
    )
    accumulate: Annotated[Literal["host"] | PositiveInt, Word] = _field(
        "host", "host, or an integer of at least 1", "micro-batches an update"
    )
    effective_batch: Annotated[Literal["host"] | PositiveInt, Word] = _field(
        "host", "host, or an integer of at least 1", "samples an update"
    )
    normalise: Annotated[Literal["exact", "host"], Word] = _field(
        "exact", "exact, host", "exact: weight micro-batches by their targets, as one big batch would"
    )
    clip_norm: Annotated[Literal["host", "off"] | PositiveFloat, Word] = _field(
        "host", "host, off, or a number above 0", "L2 norm that gradients are clipped to, once an update"
    )
    ema: Annotated[Literal["host", "off"] | Decay, Word] = _field(
        "host", "host, off, or a decay between 0 and 1", "moving average of the weights, on update steps"
    )
    batchnorm: Annotated[Literal["host", "momentum", "precise", "freeze"], Word] = _field(
        "host", "host, momentum, precise, freeze", "running statistics under accumulation"
    )
    precision: Annotated[Literal["host", "auto", "fp32", "bf16", "fp16"], Word] = _field(
        "host", "host, auto, fp32, bf16, fp16", "autocast dtype"
    )
    memory_format: Annotated[Literal["auto", "host", "channels_last"], Word] = _field(
        "auto", "auto, host, channels_last", "layout of convolution models"
    )
    lr_scale: Annotated[Literal["off", "sqrt", "linear"], Word] = _field(
        "off", "off, sqrt, linear", "learning rate when the effective batch changes"
    )
    checkpointing: Annotated[Literal["off", "auto", "on"], Word] = _field(
        "off", "off, auto, on", "activation checkpointing of repeated blocks; auto only where the batch does not fit"
    )
    validate_: Annotated[Literal["eager", "compiled"], Word] = Field(
        "eager",
        alias="validate",
        description="validation model",
        json_schema_extra={"allowed": "eager, compiled"},
    )
    nonfinite: Annotated[Literal["skip", "stop"], Word] = _field(
        "skip", "skip, stop", "a NaN or infinite gradient or loss; weights and EMA stay untouched"
    )
    cache_dir: Annotated[Literal["auto"] | Path, Word, Home] = _field(
        "auto", "auto, or a path", "compile cache of this project"
    )
    seed: Annotated[Literal["host"] | Annotated[int, Field(ge=0, lt=2**63)], Word] = _field(
        "host", "host, or an integer from 0 to 2^63 - 1", "all generators, loader workers included"
    )

    def __init__(self, config: str | Path | None = None, **options: Any) -> None:
        try:
            named = _read_file(config or os.environ.get(CONFIG_VARIABLE) or None)
            super().__init__(**trial.laid_over({**named, **_read_env(), **options}))
        except ValidationError as error:
            raise AccelError(_one_line(error)) from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the arguments: file and environment are merged into them, so that each is checked alike."""
        return (init_settings,)

    @model_validator(mode="after")
    def _no_contradiction(self) -> AccelConfig:
        if self.accumulate != "host" and self.effective_batch != "host":
            raise ValueError(
                f"accumulate={self.accumulate} and effective_batch={self.effective_batch} contradict: give one"
            )
        if self.compile == "off" and self.validate_ == "compiled":
            raise ValueError("compile=off and validate=compiled contradict: set compile=on, or validate=eager")
        return self

    def given(self) -> dict[str, Any]:
        """The fields that the user set, by their public names."""
        dumped = self.model_dump(mode="json", exclude_unset=True, by_alias=True)
        return dict(dumped)

    def dump(self) -> dict[str, Any]:
        """All fields, by their public names, as JSON values."""
        return dict(self.model_dump(mode="json", by_alias=True))


def _names() -> dict[str, str]:
    """Public name -> what is allowed."""
    fields = AccelConfig.model_fields
    return {f.alias or name: (f.json_schema_extra or {})["allowed"] for name, f in fields.items()}  # type: ignore[index,call-overload,misc]


def _read_file(config: str | Path | None) -> dict[str, Any]:
    if config is not None and not isinstance(config, (str, Path)):
        raise AccelError(f"config={config}: expected the path of a YAML file; fields go by name, as in ema=0.999")
    path = Path(config or DEFAULT_FILE)
    if not path.is_file():
        if config is None:
            return {}
        raise AccelError(f"config={config}: no such file; expected a YAML file of accel fields")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AccelError(f"config={path}: not readable as YAML: {error}") from None
    except OSError as error:
        raise AccelError(f"config={path}: not readable: {error.strerror}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise AccelError(f"config={path}: holds {type(data).__name__}, expected a mapping of field: value")
    return {str(key): value for key, value in data.items()}


def _read_env() -> dict[str, str]:
    found, names = {}, _names()
    for key, value in os.environ.items():
        if key.startswith(ENV_PREFIX) and key not in (CONFIG_VARIABLE, trial.VARIABLE):
            name = key[len(ENV_PREFIX) :].lower()
            if name not in names:
                raise AccelError(_unknown(name, f"{key}={value}"))
            found[name] = value
    return found


def _unknown(name: str, shown: str) -> str:
    names = _names()
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? Allowed fields" if near else "allowed fields"
    return f"{shown}: unknown field; {hint}: {', '.join(names)}"


def _one_line(error: ValidationError) -> str:
    """The first mistake, as `field=value: what is allowed`."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    name, names = str(first["loc"][0]), _names()
    if first["type"] == "extra_forbidden":
        return _unknown(name, f"{name}={first['input']}")
    public = name.removesuffix("_")
    values = [e["input"] for e in error.errors(include_url=False) if e["loc"][0] == name]
    return f"{public}={values[0]}: allowed are {names[public]}"
