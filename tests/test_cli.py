"""`accel`: what it prints, and that a user's mistake is one line and exit code 1."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core.autotune.background_compile import CompileFindings
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.plan import Plan
from plugins.core.telemetry.report import Report
from tests.accel_command import accel_command
from tests.core.remembered import entry

KEY = "ab" * 32


@pytest.fixture
def accel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """`accel("doctor")`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return accel_command(monkeypatch, capsys)


@pytest.fixture
def memory(tmp_path: Path) -> PlanCache:
    made = PlanCache(tmp_path / "cache")
    made.keep(
        KEY, entry(Plan("bf16", "channels_last", "regional"), compile=CompileFindings(cold_seconds=3.25).as_dict())
    )
    return made


def one_line(code: int, error: str) -> str:
    assert code == 1
    assert error.startswith("accel: ")
    assert error.count("\n") == 1
    return error


def test_doctor_says_what_is_here(accel) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = accel("doctor")
    assert code == 0
    assert torch.__version__ in out
    assert "precision=auto" in out
    assert "compile" in out


def test_report_in_words_and_figures(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = Report("test", {})
    made.window.updates, made.warnings = 7, ["look here"]
    made.write(tmp_path / "run")
    for given in (tmp_path / "run", tmp_path / "run" / "accel_report.json"):
        code, out, _ = accel("report", given)
        assert code == 0
        assert "7 updates" in out
        assert "look here" in out


def test_report_prints_words_as_they_are(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = Report("test", {}, warnings=["file /data/[/x]/a[1].png is damaged :smile:"])
    made.compile.reason, made.speed.plan = "[red]", "[/bold]"
    made.speed.candidates = [{"plan": "[/]", "loss": "text"}, {}]
    (tmp_path / "accel_report.json").write_text(json.dumps(made.data()))
    code, out, _ = accel("report", tmp_path)
    assert code == 0
    for word in ("/data/[/x]/a[1].png is damaged :smile:", "[red]", "[/bold]", "[/]"):
        assert word in out


REPORT = Report("test", {}).data()
NO_REPORT: list[Any] = [
    *(None, "", "[]", "{}", '{"window": 1}', "\xff\xfe", "[" * 100_000),
    *({**REPORT, **wrong} for wrong in ({"warnings": None}, {"warnings": [1]}, {"compile": []}, {"window": None})),
    *({**REPORT, "speed": {"candidates": wrong}} for wrong in (None, "x", [1])),
    *({**REPORT, "speed": {"step_seconds_median": "a"}}, {**REPORT, "window": {"updates": "[/x]"}}),
]


@pytest.mark.parametrize("data", NO_REPORT, ids=lambda data: str(data)[-40:])
def test_a_report_that_is_none_is_one_line(accel, tmp_path: Path, data: Any) -> None:  # type: ignore[no-untyped-def]
    if data is not None:
        text = data if isinstance(data, str) else json.dumps(data)
        (tmp_path / "accel_report.json").write_text(text, encoding="latin-1")
    code, _, error = accel("report", tmp_path)
    assert "run=" in one_line(code, error)


def test_a_report_of_fewer_parts_is_shown(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "accel_report.json").write_text(json.dumps({"host": "test", "config": {}, "speed": {}}))
    assert accel("report", tmp_path)[0] == 0


def test_cache_list(accel, memory: PlanCache) -> None:  # type: ignore[no-untyped-def]
    (memory.folder / "inductor").mkdir()
    (memory.folder / "inductor" / "x.so").write_bytes(bytes(2 * 2**20))
    code, out, _ = accel("cache", "list", "--folder", memory.folder)
    assert code == 0
    for word in (KEY[:12], "bf16 + channels_last + regional compile", "3,011,238", "cold 3.2 s", "1 plans, 2.0 MiB"):
        assert word in out


@pytest.mark.parametrize(
    "damage", [{"parameters": None}, {"compile": []}, {"compile": {"cold_seconds": "a"}}, {"plan": 7}]
)
def test_cache_list_shows_what_is_damaged_and_leaves_it(  # type: ignore[no-untyped-def]
    accel, memory: PlanCache, damage: dict[str, Any]
) -> None:
    memory.keep("cd" * 32, {**entry(), **damage})
    (memory.plans / f"{'ef' * 32}.json").write_text("{")
    (memory.plans / "my.json").write_text("{")
    before = {path: path.read_text() for path in memory.plans.iterdir()}
    code, out, error = accel("cache", "list", "--folder", memory.folder)
    assert (code, error) == (0, "")
    assert out.count("damaged") == 2
    assert {path: path.read_text() for path in memory.plans.iterdir()} == before


def test_cache_list_prints_words_as_they_are(accel, memory: PlanCache) -> None:  # type: ignore[no-untyped-def]
    memory.keep("cd" * 32, entry(device="[/x]", torch="[bold]"))
    code, out, _ = accel("cache", "list", "--folder", memory.folder)
    assert code == 0
    assert "[/x]" in out
    assert "[bold]" in out


def test_cache_prune(accel, memory: PlanCache) -> None:  # type: ignore[no-untyped-def]
    assert accel("cache", "prune", "--folder", memory.folder)[1].startswith("removed 0 plans")
    assert accel("cache", "prune", "--older-than", 0, "--folder", memory.folder)[1].startswith("removed 1 plans")
    assert list(memory.entries()) == []


def test_prune_that_may_not_or_cannot_is_one_line(  # type: ignore[no-untyped-def]
    accel, memory: PlanCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    code, _, error = accel("cache", "prune", "--older-than", 0, "--folder", tmp_path / "other")
    assert "no cache of accel" in one_line(code, error)

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    code, _, error = accel("cache", "prune", "--older-than", 0, "--folder", memory.folder)
    assert "Permission denied" in one_line(code, error)


def test_cache_export_and_import_into_the_projects_own_folder(accel, memory: PlanCache, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert accel("cache", "export", tmp_path / "c.tar.gz", "--folder", memory.folder)[0] == 0
    code, out, _ = accel("cache", "import", tmp_path / "c.tar.gz")
    assert (code, "unpacked 1 files" in out) == (0, True)
    assert KEY[:12] in accel("cache", "list")[1]


def test_mistakes_are_one_line(accel, memory: PlanCache, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "no.tar.gz").write_text("no")
    for arguments, word in (
        (("cache", "list"), "no such folder"),
        (("cache", "list", "--folder", tmp_path / "absent"), "no such folder"),
        (("cache", "export", tmp_path / "absent" / "c.tar.gz", "--folder", memory.folder), "No such file"),
        (("cache", "import", tmp_path / "no.tar.gz"), "cannot be imported"),
        (("cache", "import", tmp_path / "absent.tar.gz"), "cannot be imported"),
    ):
        code, _, error = accel(*arguments)
        assert word in one_line(code, error)


@pytest.mark.parametrize("typo", [["cahce"], ["cache", "lits"], ["cache", "list", "--foldr", "x"], ["report"]])
def test_a_typo_is_refused_with_usage(accel, typo: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, _, error = accel(*typo)
    assert code == 2
    assert "Usage" in error
    assert "Traceback" not in error
