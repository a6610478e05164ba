"""A planned loop: what is measured, and that it is then the run that the same settings by hand give, bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from plugins.core.autotune import background_compile, cost_model
from plugins.core.autotune.plan_file import PLAN_NAME, write_switches
from plugins.core.plan import Plan
from plugins.errors import AccelError
from tests.core.planned import BOTH_PLAN as BOTH
from tests.core.planned import BOTH_WIN, Blocks
from tests.core.tiny import same
from tests.loop.planned import OF, Loop

pytestmark = pytest.mark.usefixtures("_own_cache")
BY_HAND = {"plan": "off", "precision": "bf16", "memory_format": "channels_last"}


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        (BOTH_WIN, BOTH),
        ({"host": 1.0, "both": 2.0, "bf16": 2.0, "channels_last": 0.9}, Plan("host", "channels_last")),
        ({"host": 1.0, "both": 0.9, "bf16": 0.7, "channels_last": 1.1}, Plan("bf16")),
        ({}, Plan()),
    ],
)
def test_the_fastest_plan_runs_from_a_windows_start(clock, seconds, winner):
    loop = Loop(clock, seconds).run()
    assert loop.tuner.plan == winner
    assert (loop.accel.layout.precision, loop.accel.layout.memory_format) == (winner.precision, winner.memory_format)
    assert loop.accel.dtype is (torch.bfloat16 if winner.precision == "bf16" else None)
    assert [(s.update, s.plan) for s in loop.tuner.switches] == ([(4, winner)] if winner != Plan() else [])
    assert loop.accel.session.series.waiting == 0  # a trial is no waiting for data, and no step


@pytest.mark.parametrize("seconds", [BOTH_WIN, {}])
def test_a_second_run_tries_nothing_and_is_the_run_by_hand(clock, seconds):
    Loop(clock, seconds).run()
    second = Loop(clock, seconds).run()
    assert second.losses == 14
    assert [(s.update, s.plan) for s in second.tuner.switches] == ([(0, BOTH)] if seconds else [])
    options = BY_HAND if seconds else {"plan": "off", "precision": "fp32", "memory_format": "host"}
    hand = Loop(clock, seconds, planned=False, **options).run()
    assert same(second.state(), hand.state())


def test_a_trial_that_loses_leaves_the_run_as_it_was(clock):
    tried, plain = Loop(clock, {}).run(), Loop(clock, {}, plan="off", precision="host", memory_format="host").run()
    assert tried.losses > plain.losses == 14
    assert same(tried.state(), plain.state())
    strides = [[p.stride() for p in loop.model.parameters()] for loop in (tried, plain)]
    assert strides[0] == strides[1]


@pytest.mark.parametrize("planned", [True, False])
def test_plan_off_measures_nothing_and_goes_by_rule(clock, monkeypatch, planned):
    monkeypatch.setattr("plugins.core.step.precision.bf16_is_fast", lambda device: True)
    loop = Loop(clock, planned=planned, plan="off").run()
    assert loop.losses == 14
    assert loop.tuner.plan == BOTH
    assert loop.tuner.timings == loop.tuner.switches == []


@pytest.mark.parametrize("options", [{"compile": "on", "compile_backend": "eager"}, {"planned": False}])
def test_by_rule_where_candidates_cannot_be_tried(clock, monkeypatch, options):
    monkeypatch.setattr("plugins.core.step.precision.bf16_is_fast", lambda device: True)
    loop = Loop(clock, **options).run()
    assert loop.losses == 14
    assert loop.tuner.plan.memory_format == "channels_last"
    assert loop.tuner.timings == []


@pytest.mark.parametrize("chosen", ["host", "fp32"])
def test_by_rule_a_layout_that_nobody_asked_for_does_not_come_alone(clock, chosen):
    loop = Loop(clock, planned=False, precision=chosen)
    assert loop.tuner.plan.memory_format == "host"
    assert all(p.is_contiguous() for p in loop.model.parameters())
    asked = Loop(clock, planned=False, precision=chosen, memory_format="channels_last")
    assert asked.tuner.plan.memory_format == "channels_last"


@pytest.mark.parametrize("planned", [True, False])
def test_compile_is_measured_as_well(clock, monkeypatch, tmp_path, planned):
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    monkeypatch.setattr(
        background_compile, "fusable_share", lambda trial, *rest: 0.5 if trial.loss() is not None else 0
    )
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device, part=1: False)
    options = {"model": Blocks, "shape": (6,), "seconds": {"compiled": 0.5}, "planned": planned, "precision": "host"}
    measured = Loop(clock, compile="auto", compile_backend="aot_eager", **options).run()
    assert [(s.update, s.plan) for s in measured.tuner.switches] == [(4, Plan("host", "host", "regional"))]
    measured.accel.end(tmp_path)
    given = Loop(clock, compile="auto", compile_backend="aot_eager", plan=tmp_path / PLAN_NAME, **options).run()
    assert given.losses == 14
    assert given.tuner.switches == measured.tuner.switches
    assert same(given.state(), measured.state())
    half = given.accel.save(tmp_path / "half.pt")
    given.accel.end()
    again = Loop(clock, compile="auto", compile_backend="aot_eager", **options)
    again.accel.resume(half)
    assert again.accel.session.compilation.active is planned  # else from the next call of `plan` on
    again.run(1)
    assert again.tuner.plan.compile == "regional"
    again.accel.end()


def test_fp16_is_for_devices_that_scale_it(clock, tmp_path):
    path = write_switches(tmp_path, Plan("fp16"), [])
    for options in ({"precision": "fp16"}, {"plan": path}):
        with pytest.raises(AccelError, match="precision=fp16: not on a CPU"):
            Loop(clock, **options)


@pytest.mark.parametrize("left", [math.inf, 1e30, np.int64(OF), 1000.5])
def test_a_loop_without_an_end_is_long(clock, left):
    loop = Loop(clock, left=left).run()
    assert loop.tuner.plan == BOTH


def test_an_endless_loop_may_compile(clock, monkeypatch):
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    monkeypatch.setattr(
        background_compile, "fusable_share", lambda trial, *rest: 0.5 if trial.loss() is not None else 0
    )
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device, part=1: False)
    options = {"compile": "auto", "compile_backend": "eager", "precision": "host"}
    loop = Loop(clock, {"compiled": 0.5}, model=Blocks, shape=(6,), left=math.inf, **options).run()
    assert loop.tuner.plan.compile == "regional"
    loop.accel.end()


@pytest.mark.parametrize("left", [math.nan, None, "many", "12"])
def test_left_that_is_no_number_is_one_line(clock, left):
    with pytest.raises(AccelError, match=r"plan: left=.* expected the micro-batches"):
        Loop(clock, left=left).run()


@pytest.mark.parametrize("options", [{}, {"model": Blocks, "shape": (6,), "compile": "auto", "precision": "host"}])
def test_a_loss_function_that_returns_no_loss_is_one_line(clock, monkeypatch, options):
    loop = Loop(clock, **options)
    loop.given = lambda images, labels: None
    with pytest.raises(AccelError, match="the loss function returned NoneType"):
        loop.run()
    assert all(m._compiled_call_impl is None for m in loop.model.modules())
    loop.accel.end()


def test_the_report_names_the_plan(clock, tmp_path):
    Loop(clock).run().accel.end(tmp_path)
    speed = json.loads(Path(tmp_path / "accel_report.json").read_text())["speed"]
    assert speed["plan"] == BOTH.name
    assert [c["plan"] for c in speed["candidates"]] == ["host", "bf16 + channels_last", "channels_last", "bf16"]


def test_a_loss_that_cannot_be_watched_is_not_compiled(clock, monkeypatch):
    """It is run eagerly under the profiler of its operators once; the run's own steps are well."""

    def fails(*_):
        raise RuntimeError("not under a dispatch mode")

    monkeypatch.setattr(background_compile, "fusable_share", fails)
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    loop = Loop(clock, compile="auto", compile_backend="aot_eager", model=Blocks, shape=(6,), precision="host").run()
    assert loop.tuner.plan == Plan()
    assert loop.tuner.state == "done"
