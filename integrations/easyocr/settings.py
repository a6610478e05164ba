"""The official trainer's yaml, all 42 keys honoured or refused by name, and the keys that this loop adds.

`read_settings` returns both, checked. Keys that change nothing by design: `num_fiducial` (only a TPS stage has
fiducial points) and `workers` beyond what the loader can use.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from integrations.easyocr.errors import EasyOCRError
from integrations.shared.yaml_file import UnreadableYaml, read_yaml


def _number(value: Any) -> Any:
    """Python takes True for 1."""
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _text(value: Any) -> str:
    """YAML reads `number: 0123456789` as a number and an empty value as None; characters are text."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
        raise ValueError("text, in quotes where YAML would read something else")
    return "" if value is None else str(value)


def _optional_name(value: Any) -> Any:
    """`''`, `None`, `'None'` and False all mean "not given" in official files."""
    return "" if value is False or value in (None, "None", "none") else value


def home(value: Any) -> Any:
    """A path with `~` as the user's home, as in a shell; an unknown `~user` and what is no path stay as they are."""
    return os.path.expanduser(value) if isinstance(value, (str, Path)) else value  # noqa: PTH111 - Path's own raises


def _file(value: Any) -> Any:
    if isinstance(value, str):
        try:
            os.stat(home(value))  # noqa: PTH116 - of a text, as above
        except OSError as error:  # whether it is there is for who opens it
            if error.errno == errno.ENAMETOOLONG:
                raise ValueError("a path; no file has a name so long") from None
        except ValueError:  # a null character, half a character
            raise ValueError("a path; no file has this name") from None
    return home(value)


def _optimizer(value: Any) -> Any:
    """The official file writes `optim: False` for Adadelta."""
    if value is False or value in (None, "", "False"):
        return "adadelta"
    return value.lower() if isinstance(value, str) else value


def _ratios(value: Any) -> list[float]:
    """`'0.5-0.5'` -> [0.5, 0.5]; a bare number is one share."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split("-")
    try:
        return [float(str(part)) for part in parts]
    except ValueError:
        raise ValueError("numbers that add up to 1, as a list or with - between them") from None


def _selection(value: Any) -> list[str]:
    """`'a-b'` -> ['a', 'b']; `'/'` and an empty value mean everything under train_data."""
    if value in (None, "", "/"):
        return [""]
    parts = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(part, (str, int)) and not isinstance(part, bool) for part in parts):
        raise ValueError("names of folders in train_data, as a list or with - between them")
    return [str(part) for part in parts] if parts is value else str(value).split("-")


def _languages(value: Any) -> Any:
    """`en,de` or `[en, de]` on a command line."""
    return [part.strip() for part in value.strip(" []").split(",")] if isinstance(value, str) else value


Number = BeforeValidator(_number)
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Number]
Count = Annotated[Whole, Field(ge=1)]
Share = Annotated[float, Number, Field(ge=0, le=1)]
Text = Annotated[str, BeforeValidator(_text)]
File = Annotated[str, BeforeValidator(_file)]


class Settings(BaseModel):
    """Official keys under their official names, then the loop's own. Lengths in px and characters, times in updates."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())

    # characters
    number: Text = ""
    symbol: Text = ""
    lang_char: Text | None = None
    sensitive: bool = True
    # run
    experiment_name: str = "my_recognizer"
    manualSeed: Whole = Field(1111, ge=0, lt=2**63)
    workers: Whole = Field(0, ge=0)
    batch_size: Count = 32
    num_iter: Count = 300_000
    valInterval: Count = 20_000
    # weights to continue from
    saved_model: Annotated[File, BeforeValidator(_optional_name)] = ""
    FT: bool = False
    new_prediction: bool = False
    freeze_FeatureExtraction: bool = False
    freeze_SequenceModeling: bool = False
    # optimizer
    optim: Annotated[Literal["adadelta", "adam", "adamw"], BeforeValidator(_optimizer)] = "adadelta"
    lr: Positive = 1.0
    beta1: Annotated[float, Number, Field(ge=0, lt=1)] = 0.9
    rho: Share = 0.95
    eps: Positive = 1e-8
    grad_clip: Positive = 5.0
    # data
    train_data: File = ""
    valid_data: File = ""
    select_data: Annotated[list[str], BeforeValidator(_selection)] = [""]
    batch_ratio: Annotated[list[Annotated[float, Field(gt=0, le=1)]], BeforeValidator(_ratios)] = [1.0]
    total_data_usage_ratio: Annotated[float, Number, Field(gt=0, le=1)] = 1.0
    batch_max_length: Count = 25
    imgH: Whole = Field(64, ge=32)
    imgW: Whole = Field(600, ge=16)
    PAD: bool = True
    rgb: Literal[False] = False
    contrast_adjust: Annotated[Share, BeforeValidator(lambda v: 0.0 if v in (False, "False") else v)] = 0.0
    data_filtering_off: bool = False
    # network
    Transformation: Annotated[Literal["None"], BeforeValidator(lambda v: "None" if v is None else v)] = "None"
    FeatureExtraction: Literal["VGG", "ResNet"] = "VGG"
    SequenceModeling: Literal["BiLSTM"] = "BiLSTM"
    Prediction: Literal["CTC"] = "CTC"
    num_fiducial: Count = 20
    input_channel: Annotated[Literal[1], Number] = 1
    output_channel: Whole = Field(256, ge=16)
    hidden_size: Count = 256
    decode: Literal["greedy", "beamsearch"] = "greedy"

    # what this loop adds
    output: File = Field("saved_models", description="folder that holds the experiment folder")
    preprocess: Literal["reader", "official"] = "reader"
    schedule: Literal["constant", "onecycle", "cosine"] = "constant"
    warmup: Whole = Field(0, ge=0, description="updates of linear warm-up")
    patience: Whole = Field(0, ge=0, description="validations without a better model before an early stop; 0: never")
    augment: bool = False
    forward_px: Whole = Field(0, ge=0, description="samples x px of width in one forward; 0: chosen")
    lang_list: Annotated[list[str], BeforeValidator(_languages)] = ["en"]
    label_order: Literal["logical", "visual"] = Field(
        "logical", description="of right-to-left labels: as typed, or from left to right, as their pictures show them"
    )
    saved_characters: Text = ""
    image_column: str = "image"
    text_column: str = "text"
    tensorboard: bool = True
    progress: bool = True

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if len(self.select_data) != len(self.batch_ratio):
            raise ValueError(
                f"select_data names {len(self.select_data)} data sets and batch_ratio {len(self.batch_ratio)} shares: "
                "give one share a data set, separated by -"
            )
        if abs(sum(self.batch_ratio) - 1) > 1e-3:
            raise ValueError(f"batch_ratio={self.batch_ratio}: the shares must add up to 1")
        if self.preprocess == "reader" and not self.PAD:
            raise ValueError("PAD=False: the Reader always pads; set PAD: True, or preprocess: official")
        step = 8 if self.FeatureExtraction == "VGG" else 16
        if self.output_channel % step:
            raise ValueError(
                f"output_channel={self.output_channel}: {self.FeatureExtraction} needs a multiple of {step}"
            )
        if self.schedule == "constant" and self.warmup >= self.num_iter:
            raise ValueError(f"warmup={self.warmup}: must be below num_iter={self.num_iter}")
        return self

    def most_px(self, half: bool) -> int:
        """Samples x px of width that one forward may hold; wider micro-batches go through in parts.

        A seventh of the official padding's, a fifth where activations take half the bytes: either holds the peak of
        a run's memory under a third of the official one, once it has met all its widths: blocks of many sizes leave
        gaps, 0.04 to 0.08 GiB of them after 90 updates, beside what weights and scratch space take.
        """
        return self.forward_px or self.batch_size * self.imgW // (5 if half else 7)


# Official values with no future in today's EasyOCR, and why.
_WHY = {
    "Transformation": "None (the Reader has no TPS stage)",
    "FeatureExtraction": "VGG, ResNet (the Reader ships no RCNN)",
    "SequenceModeling": "BiLSTM",
    "Prediction": "CTC (the Reader decodes CTC only, not Attn)",
    "rgb": "False (the Reader reads grey pictures only)",
    "input_channel": "1 (the Reader reads grey pictures only)",
    "decode": "greedy, beamsearch",
    "optim": "False (Adadelta), adadelta, adam, adamw",
    "preprocess": "reader, official",
    "label_order": "logical (as typed), visual (from left to right, as the pictures show them)",
    "schedule": "constant, onecycle, cosine",
}
# The official file misspells one freeze key; its trainer then ignores both. Either spelling works here.
_SPELLINGS = {"freeze_FeatureFxtraction": "freeze_FeatureExtraction"}


def read_settings(
    config: str | Path | dict[str, Any], others: Iterable[str] = (), /, **options: Any
) -> tuple[Settings, dict[str, Any]]:
    """The settings of `config` (a yaml file or a mapping) with `options` laid over, and its `accel:` mapping.

    `others`: names that the caller takes beside these, for its user's slips.

    Raises:
        EasyOCRError: an unreadable file, an unknown key, a value out of range or keys that contradict.
    """
    if isinstance(config, dict):
        name, values = "config", dict(config)
    else:
        name, values = str(config), _load(Path(config))
    values |= options
    accel = values.pop("accel", None) or {}
    for wrong, right in _SPELLINGS.items():
        if wrong in values:
            given = values.pop(wrong)
            values[right] = values.get(right) or given
    if not isinstance(accel, dict):
        raise EasyOCRError(f"{name}: accel={accel!r}: expected a mapping of accel fields")
    try:
        return Settings(**values), accel
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "" if first["loc"] and first["loc"][0] in options else f"{name}: "
        raise EasyOCRError(where + _one_line(first, others)) from None


def _load(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "no such file"
            raise EasyOCRError(f"config={path}: {found}; expected the official trainer's yaml")
        values, written = read_yaml(path)
    except UnreadableYaml as error:
        raise EasyOCRError(f"config={path}: not readable as YAML: {error}") from None
    except OSError as error:
        raise EasyOCRError(f"config={path}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise EasyOCRError(f"config={path}: holds {type(values).__name__}, expected a mapping of key: value")
    # Characters are taken as written: YAML would read `number: 01234567` as an octal number.
    as_text = {key: written[key] for key in ("number", "symbol", "lang_char", "saved_characters") if key in written}
    return {str(key): value for key, value in {**values, **as_text}.items()}


def _one_line(first: Mapping[str, Any], others: Iterable[str]) -> str:
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    key, value = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        plain = key.removeprefix("accel.")  # as the yolo command spells a setting
        near = difflib.get_close_matches(plain, [*Settings.model_fields, *_SPELLINGS, *others], n=1)
        return f"{key}={value!r}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if key in _WHY:
        return f"{key}={value!r}: allowed are {_WHY[key]}"
    if first["type"].startswith("bool"):
        return f"{key}={value!r}: allowed are True, False"
    return f"{key}={value!r}: allowed is: {first['msg'].removeprefix('Value error, ')}"
