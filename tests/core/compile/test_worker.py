"""The compile worker: real processes, stood in for where they are to fail."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.exc import CppCompileError, InductorError

from plugins.core.autotune import background_compile, cost_model
from plugins.core.autotune.plan_cache import INDUCTOR, PlanCache
from plugins.core.autotune.plan_file import PLAN_NAME
from plugins.core.compile import manager
from plugins.core.compile import worker as compile_worker
from plugins.core.compile.capture import Call, Captured, Like, kinds, made
from plugins.core.compile.decision import CompileOutcome, CompileResult, CompileStage
from plugins.core.compile.worker import Worker
from plugins.core.plan import Plan
from tests.core.compile.test_toolchain import compiler
from tests.core.planned import OF, Blocks, Clock, Host, by_name
from tests.core.tiny import mlp, same, snapshot

COMPILED = Plan(compile="regional")
HANGS = "import time; time.sleep(600)"
CRASHES = "import sys; print('a line', file=sys.stderr); sys.exit('internal compiler error')"
READY = ""


def fails(outcome: CompileOutcome) -> str:
    """A worker that says of its compile what a real one would."""
    text = json.dumps(asdict(outcome))
    return f"import sys; open(sys.argv[-1][:-3] + 'outcome', 'w').write({text!r}); sys.exit({outcome.reason!r})"


# -- what a worker is given ---------------------------------------------------------------------------------------


def test_kinds_keep_everything_but_values() -> None:
    x = torch.rand(3, 4).t().requires_grad_()
    (kind, *_), _ = given = kinds(([x, 2, None], {"mask": torch.ones(2, dtype=torch.bool)}))
    assert kind == Like((4, 3), (1, 4), torch.float32, "cpu", True)
    (again, two, nothing), named = made(pickle.loads(pickle.dumps(given)))
    assert (again.shape, again.stride(), again.requires_grad, two, nothing) == (x.shape, x.stride(), True, 2, None)
    assert named["mask"].dtype is torch.bool
    assert not again.any()


def test_captured_is_one_call_a_kind_and_leaves_no_trace() -> None:
    model = Blocks(4)
    with Captured(list(model.blocks)) as captured:
        for _ in range(2):
            model(torch.rand(4, 6))
    assert [call.args[0].requires_grad for call in captured.calls] == [False, True]  # the first block's input, and on
    assert all(m._compiled_call_impl is None for m in model.modules())
    assert all(call.autocast is None for call in captured.calls)


def test_captured_notes_autocast_and_only_what_would_be_compiled() -> None:
    model = mlp()
    with (
        Captured([model], takes=lambda args: len(args[0]) == 4) as captured,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(torch.rand(4, 3))
        model(torch.rand(5, 3))
    assert [(call.args[0].shape, call.autocast) for call in captured.calls] == [((4, 3), ("cpu", torch.bfloat16))]


def test_a_worker_of_a_model_of_the_script_itself() -> None:
    """Classes that another process cannot import travel by value."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    job = pickle.loads(cloudpickle.dumps([Call(Own(), (1,), {}, None)]))
    assert job[0].module(3) == 6


# -- stand-ins in the run -----------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """A loop of a model that may be compiled, in 1.0 s a step eagerly and 0.5 s compiled, of 1,000 updates."""
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    monkeypatch.setattr(background_compile, "fusable_share", fusable)
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: True)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "inductor"))
    return new_host(Clock(monkeypatch))


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


def test_ready_code_is_changed_over_to(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, READY)
    tuner = run(host, tmp_path)
    assert tuner.plan == COMPILED
    assert [s.update for s in tuner.switches] == [5]  # begun at 4, once three steps were timed
    facts = host.open.report.compile
    assert facts.reason.startswith("0.5 s a step, eager 1 s")
    assert facts.break_even_update is not None
    assert facts.graphs >= 1
    assert host.said == []
    assert all(m._compiled_call_impl is None for m in host.model.modules())


def test_a_run_goes_through_the_stages_of_its_compile(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    stages: list[CompileStage] = []

    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        stages.append(host.open.compilation.decision.stage)
        if update == 7:
            host.open.compilation.stay_eager(CompileOutcome(CompileResult.OVER_BUDGET, "too many", retryable=False))

    tuner = run(host, each=each)
    waiting, running, eager = CompileStage.WAITING, CompileStage.RUNNING, CompileStage.EAGER
    assert stages == [waiting] * 5 + [CompileStage.COMPILING] + [running] * 2 + [eager] * 2
    assert host.open.compilation.decision.outcome.outcome is CompileResult.OVER_BUDGET
    assert tuner.background.findings.settled


def test_what_the_report_says_decides_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)

    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        facts = host.open.report.compile
        facts.decision, facts.reason = "eager", "its worker failed: a module named Errno was killed"

    tuner = run(host, each=each)
    assert tuner.plan == COMPILED
    assert host.open.report.compile.decision == "regional"
    assert host.open.report.compile.reason.startswith("0.5 s a step, eager 1 s")


def test_code_that_does_not_win_is_not_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    host.costs = by_name(host=1.0, compiled=1.0)
    tuner = run(host)
    assert tuner.plan == Plan()
    assert tuner.switches == []
    assert "does not win" in host.open.report.compile.reason
    assert host.open.report.compile.decision == "eager"
    assert all(m._compiled_call_impl is None for m in host.model.modules())


def test_in_the_hosts_bf16_as_well(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is found there is no lesson for a run of the same model in fp32."""
    stand_in(monkeypatch, READY)
    monkeypatch.setattr(background_compile, "fusable_share", lambda *args: fusable(*args) and 0.12)
    host.host_precision = "bf16"
    tuner = run(host, cache_dir=tmp_path, precision="host")
    assert "12% of a step" in tuner.background.findings.reason
    assert not tuner.background.findings.settled  # another batch may have more
    again, other = new_host(host.clock), new_host(host.clock)
    again.host_precision = "bf16"
    assert run(again, cache_dir=tmp_path, precision="host").cached.key == tuner.cached.key
    assert run(other, cache_dir=tmp_path, precision="host").cached.key != tuner.cached.key


@pytest.mark.parametrize("share", [0.12, 0.5])
def test_in_bf16_on_a_cpu_a_compile_needs_more_to_fuse(
    host: Host, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    stand_in(monkeypatch, READY)
    monkeypatch.setattr(background_compile, "fusable_share", lambda *args: fusable(*args) and share)
    tuner = run(host, precision="bf16")
    assert tuner.plan == Plan("bf16", compile="regional" if share == 0.5 else "eager")
    assert ("12% of a step" in tuner.background.findings.reason) == (share == 0.12)


def test_eager_and_compiled_steps_are_timed_in_turn(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others slow down, more and more, decides nothing."""
    stand_in(monkeypatch, READY)
    load = iter(range(1, 1000))
    host.costs = lambda plan: 1.0 + 0.1 * next(load) * (host.open.tuner.state == "compiling")
    assert run(host).plan == Plan()
    plain, compiled = host.open.tuner.timings
    assert compiled.middle - plain.middle == pytest.approx(0.1)
    assert len(plain.seconds) == len(compiled.seconds) == cost_model.repeats(OF)


def test_a_compiled_loss_that_is_another_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    host.wrong = lambda plan: 5.0 if plan.compile != "eager" else 0.0
    tuner = run(host)
    assert tuner.plan == Plan()
    assert "dropped, its loss" in tuner.background.findings.reason
    assert sum("dropped, its loss" in line for line in host.said) == 1


@pytest.mark.parametrize("bad", [1, 3])
def test_a_batch_whose_loss_is_not_finite_judges_no_compile(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: int
) -> None:
    stand_in(monkeypatch, READY)

    def each(update: int) -> None:
        worker = host.open.tuner.background._worker
        if worker is not None:
            worker.process.wait(timeout=300)
        host.wrong = lambda plan: float("nan") if 5 <= update < 5 + bad else 0.0

    tuner = run(host, each=each, cache_dir=tmp_path / "cache")
    assert [(s.update, s.plan) for s in tuner.switches] == ([(6, COMPILED)] if bad == 1 else [])
    assert ("not finite on 3 batches" in tuner.background.findings.reason) == (bad == 3)
    assert len(list(PlanCache(tmp_path / "cache").entries())) == (bad == 1)


def test_a_compile_that_loses_leaves_the_weights_of_an_eager_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, READY)
    host.costs = by_name(host=1.0, compiled=2.0)
    run(host)
    plain = new_host(host.clock)
    plain.run(10, plan="off", precision="host")
    assert same(snapshot(host.model), snapshot(plain.model))


def test_a_run_that_changed_over_is_the_run_with_its_file(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    run(host, tmp_path)
    again = new_host(host.clock)
    tuner = run(again, plan=tmp_path / PLAN_NAME)
    assert tuner.switches == host.open.tuner.switches != []
    assert same(snapshot(again.model), snapshot(host.model))


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


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


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
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device: False)
    monkeypatch.setattr(compile_worker, "command", lambda: pytest.fail("no worker"))
    assert run(host).plan == COMPILED  # in the run itself


@pytest.mark.timeout(300, method="thread")  # its other way takes the one timer that a process has
@pytest.mark.inductor
def test_a_hanging_compiler_in_the_run_itself_is_given_up(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And leaves the run, and what the compiler started, as if nothing had been."""
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device: False)
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


def test_where_no_core_is_free_a_short_compile_is_made_in_the_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: False)
    monkeypatch.setattr(background_compile, "may_limit", lambda: True)
    monkeypatch.setattr(compile_worker, "command", lambda: pytest.fail("no worker"))
    tuner = run(host, each=lambda update: None)
    assert [(s.update, s.plan) for s in tuner.switches] == [(4, COMPILED)]
    assert "for which the run waited" in tuner.background.findings.reason


@pytest.mark.parametrize("long", [True, False], ids=["long", "without a limit"])
def test_where_no_core_is_free_the_run_waits(host: Host, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: False)
    monkeypatch.setattr(background_compile, "may_limit", lambda: long)
    if long:
        monkeypatch.setattr(background_compile, "IN_RUN_SECONDS", 0.0)
    stand_in(monkeypatch, "import time; time.sleep(1)")
    tuner = run(host, each=lambda update: None)
    assert [(s.update, s.plan) for s in tuner.switches] == [(4, COMPILED)]
    assert "for which the run waited" in tuner.background.findings.reason


def test_a_hanging_compiler_that_the_run_waits_for_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "has_spare_core", lambda device: False)
    monkeypatch.setattr(background_compile, "IN_RUN_SECONDS", 0.0)
    monkeypatch.setattr(cost_model, "budget", lambda *_: 0.5)
    stand_in(monkeypatch, HANGS)
    assert run(host, each=lambda update: None).plan == Plan()
    assert "outlived its budget" in one_line(host)


def test_a_spare_core_is_one_that_training_does_not_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    for threads, spare in ((1, True), (2, False), (3, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert background_compile.has_spare_core(torch.device("cpu")) is spare
        assert background_compile.has_spare_core(torch.device("cuda"))


def test_a_run_too_short_says_how_many_updates_a_compile_needs(host: Host) -> None:
    host.run(8, of=30, compile="auto", compile_backend="eager")
    assert host.losses == 8
    assert "pays in a run of about 78 updates or more; 26 are left" in host.open.report.compile.reason


# -- what was learnt ----------------------------------------------------------------------------------------------


def test_a_second_run_compiles_from_its_first_update(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    monkeypatch.setattr(PlanCache, "has_code", lambda self, needed: True)
    run(host, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compile_worker, "command", lambda: pytest.fail("no second compile"))
    again = new_host(host.clock)
    tuner = run(again, cache_dir=tmp_path / "cache")
    assert again.losses == 10
    assert [(s.update, s.plan) for s in tuner.switches] == [(0, COMPILED)]


def test_code_that_went_away_is_compiled_again_beside_the_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    run(host, cache_dir=tmp_path / "cache")
    assert [s.update for s in run(new_host(host.clock), cache_dir=tmp_path / "cache").switches] == [5]


def test_other_code_is_not_the_plans(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, READY)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "code"))
    own, other = (tmp_path / "code" / "fxgraph" / "ab" / name / "graph" for name in ("own", "other"))
    own.parent.mkdir(parents=True)
    own.write_bytes(b"")
    for switched in (5, 0):
        tuner = run(new_host(host.clock), cache_dir=tmp_path / "cache")
        assert [(s.update, s.plan) for s in tuner.switches] == [(switched, COMPILED)]
    other.parent.mkdir()
    own.rename(other)
    assert [s.update for s in run(new_host(host.clock), cache_dir=tmp_path / "cache").switches] == [5]


def test_a_longer_run_asks_again_and_a_loser_is_not_asked_twice(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host.costs = by_name(host=1.0, compiled=2.0)
    stand_in(monkeypatch, READY)
    options = {"compile": "auto", "compile_backend": "eager", "cache_dir": tmp_path / "cache"}
    host.run(8, of=30, **options)
    second = new_host(host.clock)
    second.costs = host.costs
    assert "does not win" in run(second, cache_dir=tmp_path / "cache").background.findings.reason
    third = new_host(host.clock)
    assert "does not win" in run(third, cache_dir=tmp_path / "cache").background.findings.reason
    assert third.losses == 10


def test_past_the_budget_of_graphs_the_plan_is_eager_and_stays_so(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, READY)
    tuner = run(host, tmp_path, cache_dir=tmp_path / "cache", recompile_budget=1)
    assert [s.plan for s in tuner.switches] == [COMPILED, Plan()]
    assert "recompile_budget" in host.open.report.compile.reason
    assert host.open.report.speed.plan == "host"
    again = new_host(host.clock)
    assert run(again, cache_dir=tmp_path / "cache", recompile_budget=1).switches == []


# -- the real one -------------------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_the_run_finds_the_workers_code_in_the_cache(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(INDUCTOR)
    cache = tmp_path / "cache"
    for updates, switched in ((8, 5), (3, 0)):
        counters.clear()
        torch._dynamo.reset()
        held = new_host(host.clock)
        tuner = run(held, tmp_path, updates, compile_backend="inductor", cache_dir=cache)
        assert [(s.update, s.plan) for s in tuner.switches] == [(switched, COMPILED)], tuner.background.findings
        assert counters["inductor"]["fxgraph_cache_hit"] > 0
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
        assert held.open.report.compile.cache == "warm"
        assert held.said == []
    assert os.environ[INDUCTOR] == str(cache / "inductor")
