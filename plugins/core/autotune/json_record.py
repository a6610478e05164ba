"""What an earlier run wrote, checked field by field when it is read: a damaged file is one line, never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from plugins.core.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11

LARGEST = 2**26  # bytes of a record or a report
SHOWN = 200  # characters of a mistake: the value in it may be a whole file

AnyPlan = Annotated[Plan, PlainValidator(Plan.from_dict)]


class Record(BaseModel):
    """A JSON file's fields. Others are ignored: a later release may write more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError, or ValueError with one line that names the field."""
        try:
            return cls.model_validate_json(read_bounded(path))
        except ValidationError as error:
            raise ValueError(one_line(error)) from None


def read_bounded(path: Path) -> bytes:
    """A file's bytes; of one that is larger than any that is written here, ValueError."""
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"over {LARGEST >> 20} MiB")
    return data


def one_line(error: ValidationError) -> str:
    """The first mistake: which field, and what is wrong."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return " ".join(f"{where} {first['msg'].removeprefix('Value error, ')}".split())[:SHOWN]
