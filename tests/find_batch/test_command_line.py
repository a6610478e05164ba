"""`accel find-batch`: bad input is one line and exit code 2; a whole search over a job whose memory is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plugins.find_batch import finder
from plugins.find_batch.search import Measurement, Outcome
from plugins.find_batch.trials import Trials
from tests.accel_command import accel_command
from tests.trial_run.jobs import loop


@pytest.fixture
def accel(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """`accel("--memory", "1GiB", ...)`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    return accel_command(monkeypatch, capfd, "find-batch", columns=160)


class Known(Trials):
    """A job whose memory is known: 1 GiB, and `sample` for each sample; steps of the rescue take something off."""

    sample, saved = 0.05, 0.5

    def measure(self, micro_batch, settings=None, checks=(), limit_gib=None, command=None):  # type: ignore[no-untyped-def]
        given, self.host = settings or {}, "loop"
        sample = self.sample * (self.saved if given.get("precision") == "bf16" else 1)
        peak = 1.0 + sample * micro_batch
        if peak > (limit_gib or self.limit_gib):
            return Measurement(micro_batch, Outcome.OVER)
        return Measurement(micro_batch, Outcome.DONE, peak, 0.01)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The command of a job, and `Trials` that measure nothing."""
    monkeypatch.setattr("plugins.find_batch.trials.Trials", Known)
    monkeypatch.setattr(finder, "free_gib", lambda device: 100.0)
    monkeypatch.setattr(finder, "bf16_is_fast", lambda device: True)
    return loop(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--", "python", "train.py"], "--memory: none was given"),
        (["--memory", "lots", "--", "python", "train.py"], "--memory=lots: expected a size"),
        (["--memory", "0GiB", "--", "python", "train.py"], "--memory=0GiB: no memory at all"),
        (["--memory", "900TiB", "--", "python", "train.py"], "--memory=900TiB: this machine has"),
        (["--memory", "1MiB", "--", "python", "train.py"], "--memory=1MiB: a process with torch loaded takes"),
        (["--memory", "90%"], "command: none was given"),
        (["--memory", "90%", "--", "python", "none.py"], "command=none.py: no such file"),
        (["--memory", "90%", "--", "yolo", "val"], "command=yolo val: no training"),
        (["--memory", "90%", "--", "no-such-program"], "command=no-such-program: no such program"),
        *(
            (
                ["--memory", "90%", f"--effective-batch={text}", "--", "python", "train.py"],
                f"--effective-batch={text}: ",
            )
            for text in ("0", "-4", "2.5", "x")
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(accel, arguments: list[str], why: str) -> None:  # type: ignore[no-untyped-def]
    code, out, error = accel(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith(f"accel: {why}")
    assert error.count("\n") == 1


def test_the_largest_divisor_that_fits_is_printed_with_the_command(accel, known: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = accel("--memory", "3GiB", "--effective-batch", 64, "--", *known)
    assert code == 0
    assert re.search(r"32 .*taken", out)  # 2.6 GiB; 64 would take 4.2
    assert "32 x 2 = 64 samples an update" in out
    assert "by the forecast the limit is at about 40, 51 MiB a sample" in out
    assert f"$ ACCEL_EFFECTIVE_BATCH=64 {' '.join(known)}" in out
    assert "DataLoader(batch_size=32)" in out


def test_without_an_effective_batch_the_largest_of_all_is_found(accel, known: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = accel("--memory", "3GiB", "--", *known)
    (found,) = re.findall(r"(\d+) .*taken", out)
    assert code == 0
    assert 36 <= int(found) <= 40
    assert "effective_batch" not in out.lower()


def test_where_nothing_fits_the_rescue_is_measured_and_its_settings_are_in_the_command(  # type: ignore[no-untyped-def]
    accel, known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Known, "sample", 2.5)
    code, out, _ = accel("--memory", "2.5GiB", "--effective-batch", 8, "--", *known)
    assert code == 0
    for row in (
        r"smallest micro-batch .*3.50 GiB .*too much",
        r"accumulation .*too much",
        r"autocast .*2.25 GiB .*fits",
    ):
        assert re.search(row, out), row
    assert "activation checkpointing" not in out
    assert "1 x 8 = 8 samples an update" in out
    assert "ACCEL_PRECISION=bf16 ACCEL_EFFECTIVE_BATCH=8" in out


def test_nothing_fits_at_all_is_exit_code_1(accel, known: list[str], monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(Known, "sample", 9.0)
    code, out, _ = accel("--memory", "2GiB", "--effective-batch", 8, "--", *known)
    assert code == 1
    assert "nothing here fits into 2.00 GiB" in out
    assert "$" not in out


def test_apply_runs_the_command_with_the_size_that_was_found(accel, known: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "train.py"
    says = "print('ran', os.environ['ACCEL_EFFECTIVE_BATCH'], *sys.argv[1:])"
    script.write_text(f"import os, sys\n{says}\nif 0:\n    import plugins.loop\nsys.exit(7)")
    code, out, _ = accel("--memory", "3GiB", "--effective-batch", 64, "--apply", "--", *known, "--batch-size", 4)
    assert (code, out.splitlines()[-1]) == (7, "ran 64 --batch-size 32")


def test_apply_runs_nothing_where_the_script_has_to_be_changed(accel, known: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, _, error = accel("--memory", "3GiB", "--effective-batch", 64, "--apply", "--", *known)
    assert code == 2
    assert error.startswith("accel: --apply: not run")


def test_presets_are_marked_as_a_forecast(accel) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = accel("--presets")
    assert code == 0
    for word in (
        "forecast",
        "Forecast, not measured",
        "8 GiB",
        "12 GiB",
        "16 GiB",
        "24 GiB",
        "detection",
        "recognition",
        "encoder",
    ):
        assert word in out
