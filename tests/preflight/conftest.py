"""Trials in this process: a tenth of a second in the place of the six that a child takes to import torch."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.preflight import trials as trials_of
from plugins.preflight.trials import Job, Trials
from plugins.trial_run import child
from plugins.trial_run.launch import TrialResult, _judged
from plugins.trial_run.request import VARIABLE, TrialRequest
from tests.trial_run.jobs import loop

AT_EXIT: list[Callable[[], None]] = []


def run_here(
    command: list[str], request: TrialRequest, timeout: float = 0.0, memory_limit: None = None, progress: Any = None
) -> TrialResult:
    """As `plugins.trial_run.run` of a script."""
    os.environ[VARIABLE] = str(request.write())
    request.lines.unlink(missing_ok=True)
    code, words = 0, ""
    try:
        runpy.run_path(command[1], run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code or 0)
    except Exception:
        code, words = 1, traceback.format_exc()
    finally:
        while AT_EXIT:
            AT_EXIT.pop()()
        del os.environ[VARIABLE]
    lines = request.lines.read_text().splitlines() if request.lines.is_file() else []
    records = [json.loads(line) for line in lines]
    return TrialResult(code, _judged(code, records, words), records, 0.1, words)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trials]:
    """`job(lr=30, ...)`: the trials of a tiny loop, parts of which are as given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(trials_of, "run", run_here)
    monkeypatch.setattr(child, "at_exit", AT_EXIT.append)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def build(updates: int = 16, rates: tuple[float, ...] = (), wanted: int | None = None, **parts: object) -> Trials:
        return Trials(Job(loop(tmp_path, **parts), tmp_path / "trials", updates, batch=wanted, rates=rates))

    return build
