"""`accel preflight`: its table, its JSON, its exit codes, and that a mistake is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.preflight import command, trials
from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict
from plugins.trial_run.launch import Ended, TrialResult
from tests.accel_command import accel_command
from tests.preflight.conftest import run_here
from tests.trial_run.jobs import loop

Build = Callable[..., Trials]
ASKS = "import argparse; p = argparse.ArgumentParser(); p.add_argument('x'); p.parse_args()"


@pytest.fixture
def accel(job: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """`accel("preflight", ...)`: exit code, stdout, stderr; trials run in this process."""
    return accel_command(monkeypatch, capsys)


def verdict_on(worst: Verdict) -> Callable[[Trials], Finding]:
    def check(trials: Trials) -> Finding:
        assert trials.first.updates
        return Finding("one thing", worst, "7 of 9", "" if worst is Verdict.PASS else "do this")

    return check


@pytest.mark.parametrize(("worst", "code"), [(Verdict.PASS, 0), (Verdict.WARN, 0), (Verdict.FAIL, 1)])
def test_the_exit_code_is_1_where_a_verdict_fails(
    accel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worst: Verdict, code: int
) -> None:
    monkeypatch.setattr(command, "CHECKS", (verdict_on(worst),))
    before = set(tmp_path.iterdir())
    given, out, _ = accel("preflight", "--updates", 2, "--json", "found.json", "--", *loop(tmp_path))
    assert given == code
    assert "one thing" in out
    assert worst.value in out
    advice = "" if worst is Verdict.PASS else "do this"
    told = {"check": "one thing", "verdict": worst.value, "figure": "7 of 9", "advice": advice}
    assert json.loads((tmp_path / "found.json").read_text()) == [told]
    assert {p.name for p in set(tmp_path.iterdir()) - before} == {"train.py", "found.json"}


def test_what_the_trials_leave_is_kept_where_that_is_asked_for(
    accel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CHECKS", (verdict_on(Verdict.PASS),))
    assert accel("preflight", "--updates", 2, "--keep", "kept", "--", *loop(tmp_path))[0] == 0
    assert (tmp_path / "kept" / "training" / "accel_report.json").is_file()
    code, _, error = accel("preflight", "--keep", "kept", "--", *loop(tmp_path))
    assert (code, "kept: is there already" in error) == (2, True)


def test_a_scan_leaves_its_picture(accel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHECKS", (verdict_on(Verdict.PASS),))
    assert accel("preflight", "--updates", 3, "--lr-scan", "--picture", "s.png", "--", *loop(tmp_path))[0] == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "parts", "words"),
    [
        (["--updates", "0"], {}, "updates=0: allowed are 1 to 50"),
        (["--updates", "51"], {}, "updates=51: allowed are 1 to 50"),
        (["--batch", "0"], {}, "batch=0"),
        (["--timeout", "0"], {}, "timeout=0"),
        (["--json", "no/where.json"], {}, "no such folder"),
        ([], {"before": "sys.exit(0)"}, "no update was made: no training"),
        ([], {"before": ASKS}, "no update was made"),
        ([], {"before": "raise ValueError('no such data set')"}, "no such data set"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    accel, tmp_path: Path, options: list[str], parts: dict[str, str], words: str
) -> None:
    code, _, error = accel("preflight", *options, "--", *loop(tmp_path, **parts))
    assert code == 2
    assert words in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [[], ["yolo", "predict"], ["no-such-program"]])
def test_a_command_that_is_no_training_is_one_line_and_exit_code_2(
    accel, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    from plugins.trial_run.launch import run

    monkeypatch.setattr(trials, "run", run)
    code, _, error = accel("preflight", "--", *words)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("accel: command")


def test_a_ctrl_c_is_quiet(accel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "run", lambda *_, **__: TrialResult(-2, Ended.INTERRUPTED))
    code, _, error = accel("preflight", "--keep", "kept", "--", *loop(tmp_path))
    assert (code, error) == (130, "accel: preflight was stopped\n")


def test_the_trials_run_here_as_in_a_child(job: Build, tmp_path: Path) -> None:
    assert run_here(loop(tmp_path), job().job and trials.TrialRequest(2, tmp_path / "t")).ended is Ended.COMPLETE
