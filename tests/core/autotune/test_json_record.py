from __future__ import annotations

from pathlib import Path

import pytest

from plugins.core.autotune.json_record import SHOWN, AnyPlan, Record
from plugins.core.plan import Plan


class Of(Record):
    seconds: float
    plan: AnyPlan = Plan()


def read(folder: Path, text: str) -> Of:
    (folder / "x.json").write_text(text)
    return Of.read(folder / "x.json")


def test_a_record_is_read_and_other_fields_are_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, '{"seconds": 1, "plan": {"compile": "whole"}, "later": 1}').plan == Plan(compile="whole")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"seconds": NaN}', "seconds"),
        ('{"seconds": "1"}', "seconds"),
        ('{"seconds": 1, "plan": {"compile": "' + "\\n" * 1000 + '"}}', "plan compile="),
        ("[" * 100_000, "Invalid JSON"),
    ],
)
def test_a_mistake_is_one_short_line(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= SHOWN


def test_no_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Of.read(tmp_path / "absent.json")
