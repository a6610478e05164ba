"""No compile worker outlives its run, however that ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plugins.core.compile import worker as compile_worker
from plugins.core.compile.worker import Worker
from tests.core.compile.stand_ins import HANGS, READY, alive, run, stand_in
from tests.core.planned import Host


def test_a_hanging_compiler_does_not_outlive_the_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, HANGS)
    workers: list[Worker] = []

    def keep(update: int) -> None:
        workers.extend(w for w in [host.open.tuner.background._worker] if w is not None)

    run(host, each=keep)
    assert workers[0].process.poll() == -signal.SIGKILL
    assert not workers[0].folder.exists()
    assert "ended before" in host.open.report.compile.reason


def test_a_worker_that_is_forgotten_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a cell was interrupted and its names were given to the next run."""
    stand_in(monkeypatch, HANGS)
    worker = Worker([], {}, (), 600.0)
    process, folder = worker.process, worker.folder
    del worker
    gc.collect()
    assert process.poll() == -signal.SIGKILL
    assert not folder.exists()


def test_a_fork_of_the_run_leaves_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, HANGS)
    worker = Worker([], {}, (), 600.0)
    compile_worker._stop(os.getpid() + 1, worker.process, worker.folder)
    assert worker.poll() == "running"
    assert worker.folder.exists()
    worker.stop()


REAL = "import time; from plugins.core.compile import worker as p; p.run = lambda job: time.sleep(600); p.main()"
RUN = f"""
import signal, sys, time, tempfile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that it is ignored
tempfile.tempdir = sys.argv[1]
from plugins.core.compile import worker as precompile
precompile.command = lambda: [sys.executable, "-c", {REAL!r}]
worker = precompile.Worker([], {{}}, (), 600.0)
print(worker.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_a_worker_whose_run_was_ended(tmp_path: Path, by: signal.Signals) -> None:
    root = str(Path(compile_worker.__file__).parents[3])
    run_ = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert run_.stdout is not None
    worker = int(run_.stdout.readline())
    assert list(tmp_path.iterdir())
    run_.send_signal(by)
    run_.wait(timeout=60)
    until = time.monotonic() + 60
    while (list(tmp_path.iterdir()) or alive(worker)) and time.monotonic() < until:
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []
    assert not alive(worker)


def test_a_worker_sweeps_folders_of_runs_that_are_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=60)
    names = [
        f"accel-compile-{gone.pid}-a",
        f"accel-compile-{os.getpid()}-b",
        "accel-compile-c-d",
        f"other-{gone.pid}-e",
    ]
    for name in names:
        (tmp_path / name / "in").mkdir(parents=True)
    (tmp_path / f"accel-compile-{gone.pid}-link").symlink_to(tmp_path / names[-1])
    monkeypatch.setattr(compile_worker.tempfile, "tempdir", str(tmp_path))
    stand_in(monkeypatch, READY)
    Worker([], {}, (), 600.0).stop()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.is_symlink()) == sorted(names[1:])
    assert (tmp_path / names[-1] / "in").is_dir()
