"""Several processes for one test: with a time limit, and an error that says what each rank was doing.

What could hang without it: a rank that died while the others wait in a collective (torch's own limit is half an
hour); gloo looking for its own host's name; a killed launcher whose workers go on and hold its pipes; and an
interpreter that finalises while gloo's threads still let go of Python objects. So ranks meet through a file, on the
loopback interface, with a short limit; they leave without finalising; and all of them end with the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]
STORE = "store"
COLLECTIVE = 60
"""Seconds that a rank waits for another."""


def environment(**more: str) -> dict[str, str]:
    """Of a process on the CPU; `more` wins."""
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **ours, "ACCELERATE_USE_CPU": "true", **more}


def run(target: str, folder: Path, ranks: int = 2, seconds: float = 150, *names: str, **more: str) -> None:
    """Call `function(rank, folder, *names)` of `target` ("module:function") in `ranks` processes that can talk.

    Raises:
        AssertionError: one of them failed, or the time was up; with each rank's last words.
    """
    (folder / STORE).unlink(missing_ok=True)
    started, logs = [], [folder / f"rank{rank}.log" for rank in range(ranks)]
    end = time.time() + seconds
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, "-m", "tests.processes", target, str(folder), str(end), *names]
        started.append(_start(command, log, environment(**place, **more)))
    _wait(started, logs, seconds)


def launch(command: Sequence[str], log: Path, seconds: float = 300, cwd: Path = ROOT, **more: str) -> str:
    """Run a command that starts processes of its own (torchrun, a host's script); returns what they all printed.

    Raises:
        AssertionError: it failed, or the time was up; all that it started is gone then.
    """
    _wait([_start(command, log, environment(**more), cwd)], [log], seconds)
    return log.read_text()


def torchrun(module: str, *arguments: str, ranks: int = 2) -> list[str]:
    """The command that runs a module in `ranks` processes, on a port of its own."""
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *rendezvous, "-m", module,
            *arguments]  # fmt: skip


def _start(command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path = ROOT) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:  # not a pipe: that of a killed launcher stays open in its workers
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _wait(started: list[subprocess.Popen[bytes]], logs: list[Path], seconds: float) -> None:
    """Until all have ended, one has failed, or the time is up."""
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() for process in started):
                time.sleep(1)  # the others' own words, if they have any
                break
            time.sleep(0.05)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a launcher has left
            process.wait()
    if any(codes) or None in codes:
        what = f"not done after {seconds:.0f} s" if not any(codes) else "failed"
        words = "\n".join(f"--- {log.name} (exit {code})\n{_end(log)}" for log, code in zip(logs, codes, strict=True))
        raise AssertionError(f"{what}:\n{words}")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _rank(target: str, folder: str, end: float, *names: str) -> None:
    """What one process runs; it says where it stands if it has not come to its end shortly before that time."""
    seconds = max(end - time.time(), 4)
    faulthandler.dump_traceback_later(seconds - 3)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=min(COLLECTIVE, seconds))
    store = f"file://{folder}/{STORE}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    module, name = target.split(":")
    getattr(importlib.import_module(module), name)(rank, folder, *names)
    dist.barrier()


def leave(code: int = 0) -> None:
    """End this process here: gloo's threads let go of Python objects, and an interpreter that finalises may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _rank(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()
