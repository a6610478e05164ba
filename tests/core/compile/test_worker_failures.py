"""Compile workers that hang, crash, are killed or cannot begin: one line, and the run goes on eagerly."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.exc import CppCompileError, InductorError

from plugins.core.autotune import background_compile, cost_model
from plugins.core.compile import manager
from plugins.core.compile import worker as compile_worker
from plugins.core.compile.decision import CompileOutcome, CompileResult
from plugins.core.plan import Plan
from tests.core.compile.stand_ins import COMPILED, CRASHES, HANGS, READY, alive, new_host, one_line, run, stand_in
from tests.core.compile.test_toolchain import compiler
from tests.core.planned import Host
from tests.core.tiny import same, snapshot


def fails(outcome: CompileOutcome) -> str:
    """A worker that says of its compile what a real one would."""
    text = json.dumps(asdict(outcome))
    return f"import sys; open(sys.argv[-1][:-3] + 'outcome', 'w').write({text!r}); sys.exit({outcome.reason!r})"


def test_a_hanging_compiler_is_given_up_at_its_budget(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, HANGS)
    pids: list[int] = []

    def out_of_time(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            pids.append(worker.process.pid)
            worker.budget = 0.0

    tuner = run(host, each=out_of_time)
    assert tuner.state == "done"
    assert "outlived its budget" in one_line(host)
    assert len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_crashing_compiler_is_one_line(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, CRASHES)
    tuner = run(host)
    assert tuner.plan == Plan()
    assert "internal compiler error" in one_line(host)
    assert "internal compiler error" in host.open.report.compile.reason


def test_a_killed_worker_is_one_line_and_tried_again_in_the_next_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    run(host, cache_dir=tmp_path / "cache")
    assert "killed (signal 9)" in one_line(host)
    stand_in(monkeypatch, READY)
    assert run(new_host(host.clock), cache_dir=tmp_path / "cache").plan == COMPILED


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("InductorError: CppCompileError: C++ compile error", True),
        ("InductorError: OSError: [Errno 28] No space left on device", True),
        ("", True),
        ("Unsupported: call of a builtin", False),
        ("Unsupported: a module named Errno was killed", False),
    ],
)
def test_only_a_fault_that_lasts_is_not_tried_again(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, again: bool
) -> None:
    stand_in(monkeypatch, fails(CompileOutcome(CompileResult.FAILED, words, again)) if words else "raise SystemExit(1)")
    run(host, cache_dir=tmp_path / "cache")
    assert (words or "failed without a word") in one_line(host)
    stand_in(monkeypatch, READY)
    second = run(new_host(host.clock), cache_dir=tmp_path / "cache")
    assert second.plan == (COMPILED if again else Plan())


def test_a_compiler_that_was_missing_is_looked_for_again(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "missing_compiler", lambda *_: "no C++ compiler found")
        assert "no C++ compiler" in run(host, cache_dir=tmp_path / "cache").background.findings.reason
    assert run(new_host(host.clock), cache_dir=tmp_path / "cache").plan == COMPILED


def test_a_folder_for_the_worker_that_cannot_be_made(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(**_: str) -> str:
        raise OSError(28, "No space left on device")

    stand_in(monkeypatch, READY)
    with monkeypatch.context() as patch:
        patch.setattr(compile_worker.tempfile, "mkdtemp", full)
        run(host, cache_dir=tmp_path / "cache")
    assert "No space left" in one_line(host)
    assert run(new_host(host.clock), cache_dir=tmp_path / "cache").plan == COMPILED


def test_a_workers_error_is_one_line_without_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(job: object) -> None:
        raise RuntimeError("no such op\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace")

    (tmp_path / "job").write_bytes(pickle.dumps({"parent": os.getpid(), "seconds": 600.0}))
    monkeypatch.setattr(compile_worker, "run", broken)
    monkeypatch.setattr(compile_worker, "_die_with", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "job")])
    with pytest.raises(SystemExit, match=r"^RuntimeError: no such op$"):
        compile_worker.main()


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (OSError(28, "No space left on device"), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("no memory"), True),
        (InductorError(CppCompileError(["g++"], "killed"), None), True),
        (InductorError(OSError(28, "No space left on device"), None), True),
        (BrokenProcessPool("a process ended"), True),
        (InductorError(RuntimeError("[Errno 28] out of memory, killed"), None), False),
        (RuntimeError("no such op"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_worker_that_fails_says_by_the_error_s_type_whether_it_may_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, again: bool
) -> None:
    def broken(job: object) -> None:
        raise error

    (tmp_path / "job").write_bytes(pickle.dumps({"parent": os.getpid(), "seconds": 600.0}))
    monkeypatch.setattr(compile_worker, "run", broken)
    monkeypatch.setattr(compile_worker, "_die_with", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "job")])
    with pytest.raises(SystemExit):
        compile_worker.main()
    assert json.loads((tmp_path / compile_worker.OUTCOME).read_text())["retryable"] is again


def test_a_model_that_cannot_be_pickled_is_one_line(host: Host, tmp_path: Path) -> None:
    host.model.blocks[0].lock = threading.Lock()  # type: ignore[assignment]
    tuner = run(host)
    assert tuner.plan == Plan()
    assert "cannot be handed to a compile worker" in one_line(host)


def test_a_worker_that_does_not_fit_into_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device, part=1: False)
    monkeypatch.setattr(compile_worker, "command", lambda: pytest.fail("no worker"))
    assert run(host).plan == COMPILED  # in the run itself


@pytest.mark.timeout(300, method="thread")  # its other way takes the one timer that a process has
@pytest.mark.inductor
def test_a_hanging_compiler_in_the_run_itself_is_given_up(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And leaves the run, and what the compiler started, as if nothing had been."""
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device, part=1: False)
    monkeypatch.setattr(cost_model, "budget", lambda *_: 20.0)
    hangs = f"echo $$ >> {tmp_path}/pids; sleep 600; true"
    slow = compiler(tmp_path, f"case $* in *--version*) echo g++ 13.2;; *) {hangs};; esac")
    before, began = set(psutil.Process().children(recursive=True)), time.monotonic()
    torch._dynamo.reset()
    with inductor_config.patch({"cpp.cxx": (None, slow)}):
        tuner = run(host, compile_backend="inductor", cache_dir=tmp_path / "cache")
    assert time.monotonic() - began < 120
    assert "given up: it outlived its budget of 20 s" in one_line(host)
    assert tuner.background.findings.given_up_seconds == 20.0
    assert not tuner.background.findings.settled
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert pids
    assert not any(alive(pid) for pid in pids)
    assert set(psutil.Process().children(recursive=True)) <= before
    plain = new_host(host.clock)
    plain.run(10, plan="off", precision="host")
    assert same(snapshot(host.model), snapshot(plain.model))
    assert all(m._compiled_call_impl is None for m in host.model.modules())


def test_a_hanging_compiler_that_the_run_waits_for_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: False)
    monkeypatch.setattr(background_compile, "IN_RUN_SECONDS", 0.0)
    monkeypatch.setattr(cost_model, "budget", lambda *_: 0.5)
    stand_in(monkeypatch, HANGS)
    assert run(host, each=lambda update: None).plan == Plan()
    assert "outlived its budget" in one_line(host)
