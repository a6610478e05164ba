"""Stand-ins for a compile worker, and runs beside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core.compile import worker as compile_worker
from plugins.core.plan import Plan
from tests.core.planned import Blocks, Clock, Host, by_name

COMPILED = Plan(compile="regional")
HANGS = "import time; time.sleep(600)"
CRASHES = "import sys; print('a line', file=sys.stderr); sys.exit('internal compiler error')"
READY = ""


def new_host(clock: Clock) -> Host:
    return Host(clock, by_name(host=1.0, compiled=0.5), Blocks, (4, 6))


def fusable(trial: Any, device: torch.device, clear: Any) -> float:
    trial.loss().backward()
    clear()
    return 0.5


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(compile_worker, "command", lambda: [sys.executable, "-c", code])


def run(host: Host, folder: Path | None = None, updates: int = 10, **options: Any) -> Any:
    """The planner after a run; at every window's start a worker that is to end by itself has ended."""

    def wait(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None and worker.budget:
            worker.process.wait(timeout=300)

    each = options.pop("each", wait)
    host.run(updates, folder, each=each, **{"compile": "auto", "compile_backend": "eager", **options})
    return host.open.tuner


def one_line(host: Host) -> str:
    (line,) = [line for line in host.said if "compile" in line]
    assert "\n" not in line
    assert line.endswith("the run goes on eagerly")
    return line


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
