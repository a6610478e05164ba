from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder

from plugins.core.compile import toolchain
from plugins.core.compile.toolchain import OutOfTime, missing_compiler, time_limit

CPU = torch.device("cpu")


def compiler(folder: Path, script: str) -> str:
    path = folder / "my-g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_missing_compiler_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert "No working C++ compiler" in missing_compiler(CPU, "inductor")
    assert missing_compiler(CPU, "aot_eager") == ""


def test_a_compiler_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does it stay."""
    name = compiler(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600; true")
    monkeypatch.setattr(toolchain, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: pytest.fail("torch would hang"))
    began = time.monotonic()
    with inductor_config.patch({"cpp.cxx": (None, name)}):
        assert "my-g++ did not say its version" in missing_compiler(CPU, "inductor")
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize("given", ["missing-g++", "fails", "answers"])
def test_what_answers_or_is_not_there_is_torchs_to_judge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    scripts = {"fails": "exit 1", "answers": "echo 13.2"}
    name = compiler(tmp_path, scripts[given]) if given in scripts else given
    asked: list[str] = []
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: asked.append(name))
    with inductor_config.patch({"cpp.cxx": name}):
        assert missing_compiler(CPU, "inductor") == ""
    assert asked == [name]


@pytest.mark.timeout(120, method="thread")  # its other way takes the one timer that a process has
def test_a_limit_ends_what_was_started_inside_and_nothing_else(tmp_path: Path) -> None:
    name = compiler(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    other = subprocess.Popen(["sleep", "600"])
    began = time.monotonic()
    with pytest.raises(OutOfTime, match="given up: it outlived its budget of 1 s"), time_limit(1.0):
        subprocess.run([name], check=False)
    assert time.monotonic() - began < 30
    ended = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/fd/0")
    while ended.exists() and time.monotonic() - began < 30:  # the kernel closes what was killed in its own time
        time.sleep(0.05)
    assert not ended.exists()
    assert other.poll() is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    other.kill()
    other.wait()


@pytest.mark.timeout(120, method="thread")
def test_no_limit_where_there_can_be_none() -> None:
    signal.setitimer(signal.ITIMER_REAL, 600.0)
    with time_limit(0.1):
        time.sleep(0.3)
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
    signal.setitimer(signal.ITIMER_REAL, 0)

    def elsewhere() -> None:
        with time_limit(0.1):
            time.sleep(0.3)
        done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.timeout(120, method="thread")
def test_anothers_alarm_is_not_the_limits() -> None:
    """Another thread may set the one timer: its handler is called, and the limit holds all the same."""
    seen: list[int] = []

    def late() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(30)

    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    began = time.monotonic()
    try:
        with pytest.raises(OutOfTime), time_limit(1.0):
            late()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert 0.9 < time.monotonic() - began < 20
    assert seen == [signal.SIGALRM]
