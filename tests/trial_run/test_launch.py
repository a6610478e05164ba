"""A trial of a user's command: what it does, how it ends, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from plugins.trial_run.launch import Ended, run
from plugins.trial_run.request import TrialRequest
from tests.trial_run.jobs import loop, trial


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


def test_a_job_is_ended_at_its_last_update_and_the_users_folder_stays_untouched(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    command = loop(tmp_path)
    result = run(command, TrialRequest(3, tmp_path / "trial", checks=("gradient",)), progress=seen.append)
    assert (result.ended, result.code) == (Ended.COMPLETE, 0)
    assert [line["update"] for line in result.updates] == [0, 1, 2]
    assert all(line["samples"] == 8 and line["loss"] > 0 and line["norm"] > 0 for line in result.updates)
    assert result.report["window"]["updates"] == 3
    assert result.peak_gib > 0.05
    assert seen == result.records
    assert "the end" not in (tmp_path / "trial" / "stdout.log").read_text()
    assert not (tmp_path / "user").exists()


def test_a_job_shorter_than_the_trial_is_complete(tmp_path: Path) -> None:
    result = trial(tmp_path, loop(tmp_path, epochs=1), updates=50)
    assert (result.ended, len(result.updates)) == (Ended.COMPLETE, 8)
    assert (tmp_path / "trial" / "run" / "last.pt").is_file()
    assert not (tmp_path / "user").exists()


def test_micro_batch_and_settings_of_a_trial_win(tmp_path: Path) -> None:
    result = trial(tmp_path, loop(tmp_path), micro_batch=2, settings={"effective_batch": 8, "clip_norm": 0.5})
    assert result.ended is Ended.COMPLETE
    facts = result.report["window"]
    assert (facts["micro_batch"], facts["accumulate"]) == (2, 4)
    assert result.report["gradients"]["clip_norm"] == 0.5


def test_the_same_samples_make_the_same_gradient_at_another_micro_batch(tmp_path: Path) -> None:
    command = loop(tmp_path)
    request = {"updates": 1, "checks": ("gradient",)}
    small, large = (
        trial(tmp_path, command, micro_batch=size, settings={"effective_batch": 8}, **request).updates[0]
        for size in (2, 8)
    )
    assert small["norm"] == pytest.approx(large["norm"], rel=1e-5)
    assert small["gradient"] == pytest.approx(large["gradient"], rel=1e-4, abs=1e-5)


def test_a_loader_that_cannot_be_resized_is_said_in_one_line(tmp_path: Path) -> None:
    result = trial(tmp_path, loop(tmp_path, before="loader = [next(iter(loader))]"), micro_batch=2)
    assert result.ended is Ended.FAILED
    assert "micro_batch=2: the batches of list cannot be of another size" in result.last_line


@pytest.mark.parametrize(
    ("parts", "ended", "words"),
    [
        ({"before": "raise RuntimeError('CUDA out of memory. Tried to allocate')"}, Ended.OUT_OF_MEMORY, "Tried"),
        ({"before": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}, Ended.OUT_OF_MEMORY, ""),
        ({"before": "raise ValueError('no such data set')"}, Ended.FAILED, "no such data set"),
        ({"before": "input('data set? ')"}, Ended.FAILED, "EOF"),
        ({"before": "sys.exit(0)"}, Ended.NO_TRAINING, ""),
        ({"before": "import argparse; p = argparse.ArgumentParser(); p.add_argument('data'); p.parse_args()"},
         Ended.FAILED, "the following arguments are required: data"),
    ],
)  # fmt: skip
def test_how_a_job_ended(tmp_path: Path, parts: dict[str, str], ended: Ended, words: str) -> None:
    result = trial(tmp_path, loop(tmp_path, **parts))
    assert result.ended is ended
    assert words in result.last_line
    assert result.updates == []


def test_a_job_over_the_memory_limit_is_ended_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    child = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    command = loop(tmp_path, before=f"{child}; import time; time.sleep(1); held = torch.ones(2**27); time.sleep(60)")
    before = {p.pid for p in psutil.process_iter()}
    result = run(command, TrialRequest(3, tmp_path / "trial"), memory_limit=0.3)
    assert result.ended is Ended.OUT_OF_MEMORY
    left = [p for p in psutil.process_iter() if p.pid not in before and "sleep(99)" in " ".join(_line(p))]
    assert left == []


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_job_over_its_time_is_ended(tmp_path: Path) -> None:
    result = run(loop(tmp_path, before="import time; time.sleep(60)"), TrialRequest(3, tmp_path / "trial"), timeout=4)
    assert result.ended is Ended.TIMEOUT


def test_a_sigterm_ends_the_job_too(tmp_path: Path) -> None:
    """It has a session of its own, and would go on without whoever waits for it."""
    killer = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGTERM))
    killer.start()
    result = run(loop(tmp_path, before="import time; time.sleep(60)"), TrialRequest(3, tmp_path / "trial"), timeout=90)
    killer.join()
    assert result.ended is Ended.INTERRUPTED
