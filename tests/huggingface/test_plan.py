"""The speed plan in a real Trainer: measured, from its file, remembered, by hand or resumed, it is the same run."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from integrations.huggingface.checkpoint_folders import STATE
from plugins.core.autotune import background_compile, cost_model, paired_comparison
from plugins.core.autotune import timing as trial_module
from plugins.core.autotune.plan_cache import INDUCTOR, PlanCache
from plugins.core.autotune.plan_file import PLAN_NAME, Switch, write_switches
from plugins.core.checkpoint.rng_state import random_state
from plugins.core.compile import worker
from plugins.core.plan import Plan, Timing
from plugins.core.system import memory
from tests.core.tiny import same
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.runs import STATEFUL, report, trainer_for

ROWS = 9
JOB = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 8,  # of 3 an epoch: 2, 2 and 1 micro-batches, the last of one row
    **STATEFUL,
}
SHARES = {"bf16": 0.8, "channels_last": 0.7, "regional": 0.5, "whole": 0.5}


@dataclass(frozen=True)
class Case:
    """A model, what is left open, and the plan that wins; the same by hand."""

    head: str
    options: dict[str, Any]
    wins: Plan
    by_hand: dict[str, Any]


COMPILE = {"compile": "auto", "compile_backend": "eager"}
CASES = {
    "dropout, precision": Case(
        "bert-token",
        {"precision": "auto", "compile": "off"},
        Plan("bf16"),
        {"precision": "bf16", "compile": "off"},
    ),
    "BatchNorm, precision and layout": Case(
        "resnet-image",
        {"precision": "auto", "compile": "off"},
        Plan("bf16", "channels_last"),
        {"precision": "bf16", "memory_format": "channels_last", "compile": "off"},
    ),
    "dropout, compile": Case(
        "bert-token",
        COMPILE,
        Plan(compile="regional"),
        {**COMPILE, "compile": "on", "compile_scope": "regional"},
    ),
    "BatchNorm, everything": Case(
        "resnet-image",
        {**COMPILE, "precision": "auto", "compile_scope": "whole"},
        Plan("bf16", "channels_last", "whole"),
        {**COMPILE, "compile": "on", "compile_scope": "whole", "precision": "bf16", "memory_format": "channels_last"},
    ),
}


class Noting(Rows):
    """Rows that note which of them the loader took, in order."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        super().__init__(batch)
        self.taken: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.taken.append(index)
        return super().__getitem__(index)


@dataclass
class RandomStates(TrainerCallback):
    """All generators' state after every update."""

    after: list[dict[str, Any]] = field(default_factory=list)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.after.append(random_state())


@dataclass
class Run:
    """What a run was made of, an entry an update, and what it left."""

    folder: Path
    taken: list[int]
    weights: list[dict[str, torch.Tensor]]
    norms: list[float]
    random: list[dict[str, Any]]
    losses: list[float]  # of training and evaluation
    optimizer: dict[str, Any]
    report: dict[str, Any]

    @property
    def speed(self) -> dict[str, Any]:
        return dict(self.report["speed"])

    @property
    def switches(self) -> list[tuple[int, str]]:
        return [(s["update"], s["plan"]) for s in self.speed["switches"]]


def run(head: str, folder: Path, options: dict[str, Any], resume: Path | None = None, **more: Any) -> Run:
    torch._dynamo.reset()
    rows, states = Noting(batch_for(head, ROWS, uneven=True)), RandomStates()
    model = model_for(head)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    evaluated = Rows(rows.batch)
    trainer, spy = trainer_for(
        head,
        folder,
        ROWS,
        batch=rows,
        model=model,
        options=options,
        extra={"eval_dataset": evaluated},
        **{**JOB, **more},
    )
    trainer.add_callback(states)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    optimizer = trainer.optimizer.state_dict()
    logged = [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]
    return Run(folder, rows.taken, spy.weights, spy.norms, states.after, logged, optimizer, report(folder))


def equal(one: Run, other: Run, since: int = 0) -> None:
    """Bit for bit, of `other` the updates from `since` on."""
    assert len(one.weights) == len(other.weights[since:]) > 0
    for part in ("weights", "norms", "random"):
        for update, (ours, right) in enumerate(
            zip(getattr(one, part), getattr(other, part)[since:], strict=True), start=since
        ):
            assert same(ours, right), f"{part} of update {update}"
    assert one.losses == other.losses
    assert same(one.optimizer, other.optimizer)


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A step takes its `SHARES`, in place of what the machine would take; the trials themselves are real.

    Everything is worth a trial, and an empty script stands in for the compile worker.
    """
    timed = trial_module.time_steps

    def time_steps(trial: Any, plan: Plan, *given: Any, **named: Any) -> Timing | None:
        timing = timed(trial, plan, *given, **named)
        if timing is not None:
            taken = math.prod(SHARES.get(part, 1.0) for part in plan.as_dict().values())
            timing.seconds = [taken] * len(timing.seconds)
        return timing

    with pytest.MonkeyPatch.context() as patch:
        for module in (trial_module, paired_comparison):
            patch.setattr(module, "time_steps", time_steps)
        patch.setattr(cost_model, "bf16_is_fast", lambda device: True)
        patch.setattr(cost_model, "affordable", lambda candidates, *_: list(candidates))
        patch.setattr(cost_model, "HOPELESS", math.inf)
        patch.setattr(cost_model, "cannot_gain", lambda *_: "")
        patch.setattr(cost_model, "seconds_to_pay", lambda *_: 0.0)
        patch.setattr(cost_model, "budget", lambda *_: 600.0)
        patch.setattr(memory, "room_for_worker", lambda device, part=1: True)
        patch.setattr(
            background_compile, "has_spare_core", lambda device: False
        )  # the run waits, so that it is ready at once
        patch.setattr(worker, "command", lambda: [sys.executable, "-c", ""])
        patch.setattr(PlanCache, "has_code", lambda self, needed: True)
        patch.setenv(INDUCTOR, str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def measured(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that measures, finds a winner and switches, with a checkpoint an update; its cache lies beside it."""
    folder = tmp_path_factory.mktemp("plan")
    options = {**case.options, "plan": "auto", "cache_dir": folder / "cache"}
    return run(case.head, folder / "measured", options, save_strategy="steps", save_steps=1)


def test_a_measured_run_switches_and_is_the_run_with_its_file(case: Case, measured: Run, tmp_path: Path) -> None:
    assert measured.speed["plan"] == case.wins.name
    assert measured.switches[-1] == (2, case.wins.name)
    assert measured.speed["candidates"]
    assert measured.report["compile"]["decision"] == case.wins.compile
    file = measured.folder / PLAN_NAME
    given = run(case.head, tmp_path / "given", {**case.options, "plan": file, "cache_dir": tmp_path / "other"})
    assert given.speed["candidates"] == []
    assert given.switches == measured.switches
    equal(given, measured)
    assert json.loads((given.folder / PLAN_NAME).read_text()) == json.loads(file.read_text())


def test_a_second_run_starts_with_the_plan_and_is_the_run_by_hand(case: Case, measured: Run, tmp_path: Path) -> None:
    cache = measured.folder.parent / "cache"
    remembered = run(case.head, tmp_path / "second", {**case.options, "plan": "auto", "cache_dir": cache})
    assert remembered.speed["candidates"] == []
    assert remembered.switches == [(0, case.wins.name)]
    by_hand = run(case.head, tmp_path / "hand", {**case.by_hand, "plan": "off"})
    assert (by_hand.speed["candidates"], by_hand.switches) == ([], [])
    equal(remembered, by_hand)
    given = run(case.head, tmp_path / "given", {**case.options, "plan": remembered.folder / PLAN_NAME})
    equal(given, by_hand)
    assert remembered.report["compile"]["decision"] == by_hand.report["compile"]["decision"] == case.wins.compile


def test_a_run_resumed_after_the_switch_equals_the_straight_one(case: Case, measured: Run, tmp_path: Path) -> None:
    options = {**case.options, "plan": "auto", "cache_dir": tmp_path / "other"}
    again = run(case.head, tmp_path / "again", options, resume=measured.folder / "checkpoint-5")
    assert again.speed["candidates"] == []
    assert again.switches == measured.switches
    equal(again, measured, since=5)
    assert json.loads((again.folder / PLAN_NAME).read_text()) == json.loads((measured.folder / PLAN_NAME).read_text())


def test_a_checkpoint_of_0_1_resumes_after_the_switch_as_it_did(case: Case, measured: Run, tmp_path: Path) -> None:
    """It held counts and plan beside the weights, and no switches."""
    old = shutil.copytree(measured.folder / "checkpoint-5", tmp_path / "checkpoint-5")
    state = torch.load(old / STATE, weights_only=True)
    held = ("raw", "average_updates", "counts", "plan", "measured")
    torch.save({name: state[name] for name in held}, old / STATE)
    options = {**case.options, "plan": "auto", "cache_dir": tmp_path / "other"}
    again = run(case.head, tmp_path / "again", options, resume=old)
    assert again.speed["candidates"] == []
    assert again.switches == [(5, case.wins.name)]
    equal(again, measured, since=5)


def test_a_run_resumed_at_a_switch_of_its_file_makes_it(case: Case, measured: Run, tmp_path: Path) -> None:
    options = {**case.options, "plan": measured.folder / PLAN_NAME}
    again = run(case.head, tmp_path / "again", options, resume=measured.folder / "checkpoint-2")
    equal(again, measured, since=2)


def test_three_micro_batches_are_timed_after_the_first_which_warms_up(tmp_path: Path) -> None:
    options = {"plan": "auto", "precision": "auto", "compile": "off", "cache_dir": tmp_path / "cache"}
    assert run("bert-token", tmp_path, options, gradient_accumulation_steps=1).switches == [(4, "bf16")]


def test_losses_left_to_the_host_are_not_tried_but_a_file_is_run(tmp_path: Path) -> None:
    open_ = {"normalise": "host", "precision": "auto", **COMPILE}
    auto = run("bert-token", tmp_path / "auto", {**open_, "plan": "auto", "cache_dir": tmp_path / "cache"})
    assert (auto.speed["candidates"], auto.switches) == ([], [])
    assert "left to the host" in auto.speed["reason"]
    assert "left to the host" in auto.report["compile"]["reason"]
    file = write_switches(tmp_path, Plan(), [Switch(2, Plan("bf16"))])
    assert run("bert-token", tmp_path / "given", {**open_, "plan": file}).switches == [(2, "bf16")]


def test_trials_leave_the_loader_and_a_run_that_they_do_not_change_alone(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing wins: the run equals the one with plan=off, which measures nothing, and so does its plan file's."""
    for name in SHARES:
        monkeypatch.setitem(SHARES, name, 2.0)
    options = {**case.options, "cache_dir": tmp_path / "cache"}
    tried = run(case.head, tmp_path / "tried", {**options, "plan": "auto"})
    assert tried.speed["candidates"]
    assert tried.switches == []

    def measuring(*_: Any, **__: Any) -> None:
        pytest.fail("plan=off measures nothing")

    for module in (trial_module, paired_comparison):
        monkeypatch.setattr(module, "time_steps", measuring)
    monkeypatch.setattr(background_compile, "fusable_share", measuring)
    plain = run(case.head, tmp_path / "plain", {**options, "precision": "host", "plan": "off"})
    equal(tried, plain)
    assert tried.taken == plain.taken
    given = run(case.head, tmp_path / "given", {**options, "plan": tried.folder / PLAN_NAME})
    equal(given, plain)
