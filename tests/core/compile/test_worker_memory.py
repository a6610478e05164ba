"""Memory of a compiled step, measured on a part of the batch: what would not fit is not tried."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from plugins.core.autotune import background_compile
from plugins.core.compile.capture import Call, Captured, kinds
from plugins.core.compile.decision import CompileResult
from plugins.core.compile.worker import Worker, WorkerState
from plugins.core.plan import Plan
from tests.core.compile.stand_ins import COMPILED, CRASHES, run, stand_in
from tests.core.planned import Host
from tests.core.tiny import mlp


def test_a_part_of_a_batch_is_cut_from_every_tensor_that_is_as_long() -> None:
    given = kinds((torch.rand(8, 3), torch.rand(3, 8), [torch.rand(8)]))
    part, times = Call(mlp(), given, {"scale": 8}, None).of_batch(4)
    assert ([part.args[0].shape, part.args[1].shape, part.args[2][0].shape], part.kwargs) == (
        [(2, 3), (3, 8), (2,)],
        {"scale": 8},
    )
    assert times == 4.0
    assert Call(mlp(), kinds((torch.rand(7, 3),)), {}, None).of_batch(4)[1] == 7.0


def test_a_worker_measures_the_memory_of_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole step: a call that is made twice keeps twice as much."""
    model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh())
    ways = [{"backend": "eager"}]
    kept = 2048 * 2048 * 4 / 2**30  # of Tanh's output; the product before it is as large, and let go
    with Captured([model]) as captured:
        for _ in range(2):
            model(torch.rand(4 * 2048, 64))
    assert captured.times == [2]
    worker = Worker([call.of_batch(4)[0] for call in captured.calls], ways, (), 120.0, [6])
    worker.process.wait(timeout=120)
    assert worker.poll() is WorkerState.READY
    assert worker.memory is not None
    assert 6 * kept <= worker.memory.step_gib <= 24 * kept  # glibc keeps what is freed, too


@pytest.mark.parametrize(
    ("step_gib", "plan", "outcome"), [(0.9, COMPILED, CompileResult.WON), (1.1, Plan(), CompileResult.NO_MEMORY)]
)
def test_where_memory_is_tight_a_compile_is_tried_if_its_first_step_would_fit(
    host: Host, monkeypatch: pytest.MonkeyPatch, step_gib: float, plan: Plan, outcome: CompileResult
) -> None:
    """4 GiB are free beside the 5 GiB of the run: four times what a quarter of the batch took has to fit."""
    for name, gib in (("in_use_gib", 5.0), ("free_gib", 4.0)):
        monkeypatch.setattr(background_compile.memory, name, lambda device, gib=gib: gib)
    told = json.dumps({"left_gib": 0.0, "step_gib": step_gib})
    stand_in(monkeypatch, f"import sys; open(sys.argv[-1][:-3] + 'memory', 'w').write({told!r})")
    tuner = run(host)
    assert tuner.plan == plan
    assert tuner.background.compilation.decision.outcome.outcome is outcome


@pytest.mark.parametrize(("free", "code"), [(1.9, "raise SystemExit('never started')"), (4.0, CRASHES)])
def test_what_cannot_be_measured_is_not_tried_where_memory_is_tight(
    host: Host, monkeypatch: pytest.MonkeyPatch, free: float, code: str
) -> None:
    for name, gib in (("in_use_gib", 5.0), ("free_gib", free)):
        monkeypatch.setattr(background_compile.memory, name, lambda device, gib=gib: gib)
    stand_in(monkeypatch, code)
    tuner = run(host)
    assert tuner.plan == Plan()
    outcome = tuner.background.compilation.decision.outcome
    assert outcome.outcome is CompileResult.NO_MEMORY
    assert ("internal compiler error" in outcome.reason) == (code is CRASHES)
    assert outcome.retryable
