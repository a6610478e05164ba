"""fit under plan=auto: what it measures, and that it is then the run of the same settings by hand, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from plugins.core.autotune import background_compile, cost_model
from plugins.core.autotune.plan_file import PLAN_NAME, Switch, read_switches, write_switches
from plugins.core.plan import Plan
from plugins.easyocr import fit
from plugins.easyocr import training as plug
from tests.core.planned import Clock, by_name
from tests.easyocr.runs import assert_same_state, interrupt_at_show
from tests.easyocr.test_exact import Kept

BOTH = Plan("bf16", "channels_last")
SECONDS = {"host": 1.0, "bf16": 0.8, "channels_last": 0.7, "both": 0.5}
SILENT = {"say": lambda line: None}


@pytest.fixture(autouse=True)
def reads(monkeypatch):
    """A forward takes the seconds of the plan in force, and a run is said to have 1,000 updates; counts forwards."""
    clock, real, counted = Clock(monkeypatch), plug.read, []
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    monkeypatch.setattr("plugins.core.step.precision.bf16_is_fast", lambda device: True)
    monkeypatch.setattr(plug, "Run", Kept)

    def read(model, images):
        layout, compiled = Kept.last.accel.layout, Kept.last.accel.session.compilation.active
        counted.append(images.shape)
        clock.now += by_name(**SECONDS)(
            Plan(layout.precision, layout.memory_format, "features" if compiled else "eager")
        )
        return real(model, images)

    monkeypatch.setattr(plug, "read", read)
    monkeypatch.setattr(cost_model, "TRIAL_SHARE", 1.0)  # these runs are short
    return counted


@pytest.fixture
def options(tiny):
    return {**tiny, "num_iter": 12, "valInterval": 12, "accel": {"precision": "auto", "ema": 0.9, "accumulate": 2}}


def train(options, name, **more):
    return fit({**options, "output": options["output"] + name}, **more, **SILENT)


def test_a_run_measures_once_and_is_the_run_of_its_file(options, reads):
    measured = train(options, "_measured")
    switches = read_switches(measured.folder / PLAN_NAME)
    assert switches == [Switch(2, BOTH)]
    assert len(reads) > 24
    report = json.loads(measured.report.read_text())
    assert report["speed"]["plan"] == BOTH.name
    assert [c["plan"] for c in report["speed"]["candidates"]] == [
        "host",
        "bf16 + channels_last",
        "channels_last",
        "bf16",
    ]
    assert report["compile"]["reason"] == "convolutions gained nothing from compile on a CPU"
    assert report["speed"]["loader_wait_fraction"] == 0
    reads.clear()
    given = train(options, "_given", plan=measured.folder / PLAN_NAME)
    assert len(reads) == 24
    assert_same_state(given.folder / "last.pt", measured.folder / "last.pt")
    assert (given.folder / PLAN_NAME).read_text() == (measured.folder / PLAN_NAME).read_text()


def test_a_second_run_tries_nothing_and_is_the_run_by_hand(options, reads):
    train(options, "_first")
    reads.clear()
    second = train(options, "_second")
    assert len(reads) == 24
    assert read_switches(second.folder / PLAN_NAME) == [Switch(0, BOTH)]
    hand = train(options, "_hand", plan="off", precision="bf16", memory_format="channels_last")
    assert_same_state(second.folder / "last.pt", hand.folder / "last.pt")
    off = train(options, "_off", plan="off")  # by rule, which is the same here
    assert len(reads) == 3 * 24
    assert_same_state(off.folder / "last.pt", hand.folder / "last.pt")


def test_a_trial_that_loses_leaves_the_run_as_it_was(options, reads, monkeypatch):
    monkeypatch.setitem(SECONDS, "both", 1.0)
    monkeypatch.setitem(SECONDS, "bf16", 1.0)
    monkeypatch.setitem(SECONDS, "channels_last", 1.0)
    tried = train(options, "_tried")
    assert len(reads) > 24
    plain = train(options, "_plain", plan="off", precision="host", memory_format="host")
    assert_same_state(tried.folder / "last.pt", plain.folder / "last.pt")


@pytest.mark.parametrize("source", ["measured", "remembered", "file"])
def test_an_interrupted_run_that_is_resumed_equals_the_straight_one(options, reads, monkeypatch, tmp_path, source):
    options |= {"num_iter": 20, "valInterval": 4, "schedule": "onecycle", "warmup": 3}
    caches, more = [tmp_path / "one", tmp_path / "two"], {}
    if source == "remembered":
        train(options, "_earlier", cache_dir=caches[0])
        caches[1] = caches[0]
    if source == "file":  # one switch at the very update that the run is stopped before
        more["plan"] = write_switches(tmp_path, Plan(), [Switch(3, BOTH), Switch(10, Plan("bf16"))])
    straight = train(options, "_straight", cache_dir=caches[0], **more)
    with monkeypatch.context() as patch:
        interrupt_at_show(patch)
        half = train(options, "_half", cache_dir=caches[1], **more)
    assert (half.stopped, half.updates) == ("interrupted", 10)
    reads.clear()
    whole = train(options, "_half", resume=True, cache_dir=caches[1], **more)
    assert (len(reads), whole.updates) == (20, 20)
    assert_same_state(whole.folder / "last.pt", straight.folder / "last.pt")


def test_a_trial_sees_parts_of_one_size(options, reads):
    """The most px of a forward are fewer in fp32: plans are compared on the same samples."""
    train(options, "_parts", batch_size=16, forward_px=0, imgW=160)
    with_trial = [tuple(shape) for shape in reads]
    at = next(n for n, shape in enumerate(with_trial) if with_trial[n : n + 5] == [shape] * 5)
    assert at >= 4
    assert all(shape[0] * shape[3] <= 16 * 160 // 5 or shape[0] <= 4 for shape in with_trial)


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, plug.MOST_BUCKETS),
        ({"plan": "off"}, plug.MOST_BUCKETS),
        ({"compile": "on", "compile_backend": "eager"}, 3),
        ({"plan": "file", "compile_backend": "eager"}, 3),
    ],
)
def test_there_are_as_many_widths_as_a_plan_could_compile(options, tmp_path, monkeypatch, more, most):
    asked = []
    real = plug.choose_edges
    monkeypatch.setattr(plug, "choose_edges", lambda widths, most, step: asked.append(most) or real(widths, most, step))
    if more.get("plan") == "file":
        switches = [Switch(1, Plan(compile="features"))]
        more = {**more, "plan": write_switches(tmp_path, Plan(), switches)}
    result = train(options, "_widths", recompile_budget=5, num_iter=3, **more)
    assert asked == [most]
    report = json.loads(result.report.read_text())
    assert report["compile"]["graphs"] <= 5
    assert report["compile"]["decision"] == ("features" if most == 3 else "eager")


def test_a_plan_that_turns_compile_on_stays_within_the_budget(options, reads, monkeypatch):
    """As on a GPU, where convolutions may gain from it: fewer widths from the start, and the run of its file."""
    monkeypatch.setattr(cost_model, "cannot_gain", lambda *args: "")
    monkeypatch.setattr(
        background_compile, "fusable_share", lambda trial, *rest: 0.5 if trial.loss() is not None else 0
    )
    monkeypatch.setattr(background_compile.memory, "room_for_worker", lambda device, part=1: False)
    monkeypatch.setitem(SECONDS, "compiled", 0.1)
    monkeypatch.setattr(cost_model, "compile_seconds", lambda *args: 0.1)
    more = {"recompile_budget": 5, "compile_backend": "aot_eager", "num_iter": 30, "valInterval": 30}
    measured = train(options, "_measured", **more)
    assert [s.plan for s in read_switches(measured.folder / PLAN_NAME)] == [BOTH, replace(BOTH, compile="features")]
    report = json.loads(measured.report.read_text())
    assert len(report["shapes"]["buckets"]) == 3
    assert report["compile"]["decision"] == "features"
    assert 1 <= report["compile"]["graphs"] <= 5
    reads.clear()
    given = train(options, "_given", plan=measured.folder / PLAN_NAME, **more)
    assert len(reads) == 60
    assert_same_state(given.folder / "last.pt", measured.folder / "last.pt")


def test_everything_that_a_run_leaves_loads_without_the_plan(options):
    result = train(options, "_loads")
    state = torch.load(result.exported.files[0], weights_only=True)
    assert all(tensor.is_contiguous() for tensor in state.values())
