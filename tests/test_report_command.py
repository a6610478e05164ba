"""`accel report` of one run and of two: what is printed, what is written, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plugins.core.telemetry.report import Report
from tests.accel_command import accel_command
from tests.core.telemetry import sample
from tests.core.telemetry.hostile import hostile

PAGE = Path(__file__).parents[1] / "docs" / "report.md"


@pytest.fixture
def accel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """`accel("a", "b")`: exit code, stdout, stderr of `accel report a b`, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return accel_command(monkeypatch, capsys, "report")


def write(folder: Path, seconds: float = 0.5, host: str = "loop") -> Path:
    made = Report(host, {"compile": "off"}, warnings=["look here"])
    made.window.updates, made.speed.step_seconds_median = 7, seconds
    made.write(folder)
    return folder


def test_one_run_begins_with_its_verdict(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = accel(write(tmp_path / "run"))
    assert code == 0
    assert out.startswith("Ran at the host's own speed, exact\n")
    assert "good  7 updates" in out
    assert "warning look here" in out


def test_two_runs_begin_with_which_is_faster(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = accel(write(tmp_path / "a"), write(tmp_path / "b", 0.25) / "accel_report.json")
    assert code == 0
    assert out.startswith("B is 2 times as fast as A per update (the same job)\n")
    assert "s an update (median)" in out
    assert f"A: {tmp_path / 'a'}" in out


def test_the_page_is_written_where_it_is_asked_for(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    a, b = write(tmp_path / "a"), write(tmp_path / "b", 0.25)
    assert accel(a, "--html", "one.html")[0] == 0
    code, out, _ = accel(a, b, "--html", "two.html")
    assert (code, out.strip().splitlines()[-1]) == (0, "page: two.html")
    assert "exact" in (tmp_path / "one.html").read_text(encoding="utf-8")
    assert "B is 2 times" in (tmp_path / "two.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "one.html", "two.html"]


def test_the_documents_show_the_comparison_as_it_is(accel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    sample.write(tmp_path / "runs")
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = accel("runs/plain", "runs/tuned")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()] == shown.splitlines()


def test_mistakes_are_one_line_and_nothing_is_written(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    a, b, other = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", host="ultralytics")
    before = sorted(tmp_path.rglob("*"))
    report = (a / "accel_report.json").read_bytes()
    for arguments, words in (
        ((a, b, other), "3 runs given; expected one, or two"),
        ((a, a / "accel_report.json"), "are one run"),
        ((a, other), "host: A has loop and B ultralytics"),
        ((a, tmp_path / "absent"), "no accel_report.json there"),
        ((a, "--html", a / "accel_report.json"), "expected a name that ends in .html"),
        ((a, "--html", "absent/x.html"), "No such file or directory"),
        ((a, other, "--html", "x.html"), "can be compared"),
    ):
        code, _, error = accel(*arguments)
        assert code == 1
        assert error.startswith("accel: ")
        assert error.count("\n") == 1
        assert words in error
    assert sorted(tmp_path.rglob("*")) == before
    assert (a / "accel_report.json").read_bytes() == report


def test_a_stranger_s_report_is_printed_and_drawn(accel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "accel_report.json").write_text(json.dumps(hostile()), encoding="utf-8")
    code, out, _ = accel(tmp_path, "--html", "page.html")
    assert code == 0
    assert len(out) < 2_000_000
    assert "<script" not in (tmp_path / "page.html").read_text(encoding="utf-8")
