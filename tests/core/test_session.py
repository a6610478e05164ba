from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from plugins.core.compile.compiled_module import CompileRefused
from plugins.core.step.update import NonFiniteGradient
from tests.core.sessions import ON, listeners, sgd
from tests.core.tiny import batches, feed, mlp, session_of

# -- window ---------------------------------------------------------------------------------------------------------


def test_an_empty_window_does_not_close() -> None:
    model = mlp()
    session = session_of(model, sgd(model), 2)
    assert session.close() is None
    assert session.updates == 0


def test_a_dropped_window_is_counted_and_the_next_begins_anew() -> None:
    model = mlp()
    session = session_of(model, sgd(model), 2)
    parts = batches(0, [2, 3, 4])
    feed(session, model, parts[0])
    session.drop()
    model.zero_grad()
    assert session.window.empty
    assert feed(session, model, parts[1]) is None
    outcome = feed(session, model, parts[2])
    assert (outcome.micro_batches, outcome.samples, outcome.partial) == (2, 7, False)
    facts = session.report.window
    assert (facts.micro_batches, facts.dropped_micro_batches, facts.updates) == (3, 1, 1)


def test_a_parameter_without_gradient_is_named_once() -> None:
    said: list[str] = []
    model = mlp()
    model.register_parameter("idle", nn.Parameter(torch.zeros(1)))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(1), requires_grad=False))
    session = session_of(model, sgd(model), 1, said=said)
    for part in batches(0, [2, 2]):
        feed(session, model, part)
    assert session.report.gradients.without_gradient == ["idle"]
    assert sum("idle" in line for line in said) == 1


class Counted:
    """An average that only counts."""

    updates = 0

    def update(self) -> None:
        self.updates += 1


def test_an_engine_that_has_stepped_tells_what_it_came_to() -> None:
    said: list[str] = []
    model, average = mlp(), Counted()
    session = session_of(model, sgd(model), 2, {"clip_norm": 1.0}, said, average=average)
    outcomes = []
    for norm, stepped in ((0.5, True), (2.0, True), (float("inf"), False)):
        session.micro_batch(3)
        outcomes.append(session.engine_stepped(norm, stepped))
        session.finish_update(outcomes[-1])
    assert [(o.stepped, o.clipped, o.samples, o.partial) for o in outcomes] == [
        (True, False, 3, True),
        (True, True, 3, True),
        (False, False, 3, True),
    ]
    assert (session.report.window.updates, session.report.window.skipped_updates, average.updates) == (2, 1, 2)
    assert session.report.model == "Mlp"
    assert session.report.gradients.without_gradient == []  # the engine has taken them away
    assert not any("got no gradient" in line for line in said)


def test_an_engines_skip_ends_the_run_where_it_is_to_stop() -> None:
    session = session_of(model := mlp(), sgd(model), 1, {"nonfinite": "stop"})
    session.micro_batch(3)
    with pytest.raises(NonFiniteGradient, match="nonfinite=stop"):
        session.engine_stepped(float("inf"), False)


def test_waiting_and_validation_are_not_a_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from plugins.core import session as module

    clock = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    model = mlp()
    session = session_of(model, sgd(model), 2)

    def micro(seconds: float, waited: float) -> None:
        clock[0] += waited
        session.micro_batch(4)
        clock[0] += seconds
        session.backward_done()
        session.idle()

    micro(1.0, 0.0)
    micro(2.0, 5.0)
    with session.validation():
        clock[0] += 50
    micro(1.5, 0.0)
    micro(1.5, 7.0)
    assert list(session.series.seconds) == [3.0, 3.0]
    assert session.series.waiting == 12.0


# -- report and end ---------------------------------------------------------------------------------------------------


SCHEMA_1 = {
    "window": "accumulate micro_batch effective_batch micro_batches updates partial_windows skipped_updates exact "
    "approximate_terms",
    "compile": "decision reason mode graphs recompiles recompile_reasons graph_breaks graph_break_reasons budget "
    "seconds cache break_even_update",
    "speed": "plan candidates first_step_seconds step_seconds_median samples_per_second loader_wait_fraction",
    "memory": "kind first_step_peak_gib steady_peak_gib",
    "shapes": "seen buckets padding_fraction",
    "gradients": "norm_median clipped_fraction without_gradient",
    "batchnorm": "layers rule micro_batch_too_small",
    "ema": "decay updates",
}


def test_the_report_has_the_sections_of_schema_1_and_what_happened(tmp_path: Path) -> None:
    model = mlp(norm=True)
    session = session_of(model, sgd(model), 2, {"clip_norm": 0.05})
    for part in batches(0, [4, 4, 4, 2, 4]):
        session.shape(part.x.shape, padding=1)
        feed(session, model, part)
        session.idle()
    session.approximate("masks: by area")
    session.approximate("masks: by area")
    session.close()
    session.warn("look at <this>")
    session.warn("look at <this>")
    path = session.end(tmp_path / "run")
    assert path == tmp_path / "run" / "accel_report.json"
    data = json.loads(path.read_text())
    top = {"schema", "host", "versions", "device", "model", "parameters", "config", "warnings", "losses", "checkpoints"}
    assert set(data) == top | set(SCHEMA_1)
    assert list(data)[:6] == ["schema", "host", "versions", "device", "config", "warnings"]
    for section, fields in SCHEMA_1.items():
        assert set(fields.split()) <= set(data[section]), section
    assert data["schema"] == 1
    assert data["config"] == session.config.dump()
    window = data["window"]
    assert (window["accumulate"], window["micro_batch"], window["effective_batch"]) == (2, 8, 16)
    assert (window["micro_batches"], window["updates"], window["partial_windows"]) == (5, 3, 1)
    assert (window["exact"], window["approximate_terms"]) == (False, ["masks: by area"])
    assert data["shapes"]["seen"] == [[2, 3], [4, 3]]
    assert data["shapes"]["padding_fraction"] == pytest.approx(5 / 54)
    assert data["gradients"]["clipped_fraction"] == 1.0
    assert data["gradients"]["norm_median"] > 0.05
    assert data["speed"]["samples_per_second"] > 0
    assert data["memory"]["kind"] == "rss"
    assert data["memory"]["first_step_peak_gib"] > 0
    assert data["warnings"] == ["look at <this>"]
    page = (tmp_path / "run" / "accel_report.html").read_text()
    assert "3 updates of 16 samples (2 x 8), approximately the big batch." in page
    assert "look at &lt;this&gt;" in page
    assert "<svg" in page
    assert "<script" not in page


def test_end_undoes_and_happens_once(tmp_path: Path) -> None:
    model, before = mlp(norm=True), listeners()
    attributes = dict(vars(model))
    session = session_of(model, sgd(model), 2, {**ON, "batchnorm": "momentum"})
    assert listeners() > before
    assert model.norm.momentum != 0.1
    assert session.end(tmp_path) is not None
    (tmp_path / "accel_report.json").unlink()
    assert session.end(tmp_path) is None
    assert not (tmp_path / "accel_report.json").exists()
    assert vars(model) == attributes
    assert model.norm.momentum == 0.1
    assert listeners() == before


def test_a_session_that_cannot_be_built_leaves_the_model_as_it_was() -> None:
    model, before = mlp(norm=True), listeners()
    attributes = vars(model).copy()
    with pytest.raises(CompileRefused, match="no_such_part"):
        session_of(model, sgd(model), 2, {**ON, "batchnorm": "momentum", "compile_scope": ["no_such_part"]})
    assert vars(model) == attributes
    assert model.norm.momentum == 0.1
    assert listeners() == before


def test_a_session_ends_before_the_first_micro_batch(tmp_path: Path) -> None:
    model = mlp()
    assert session_of(model, sgd(model)).end(tmp_path) == tmp_path / "accel_report.json"


def test_a_folder_that_cannot_be_written_costs_the_report_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    model, before = mlp(norm=True), listeners()
    session = session_of(model, sgd(model), 2, {**ON, "batchnorm": "momentum"}, said)
    (tmp_path / "file").write_text("not a folder")
    assert session.end(tmp_path / "file" / "run") is None
    assert sum("report not written" in line and str(tmp_path / "file") in line for line in said) == 1
    assert model._compiled_call_impl is None
    assert model.norm.momentum == 0.1
    assert listeners() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        session = session_of(mlp(), sgd(mlp()))
        assert session.end(tmp_path) is None
        assert "Permission" in session.report.warnings[-1]
    finally:
        tmp_path.chmod(0o700)


def test_a_loss_weighted_by_hand_is_what_the_hooks_give() -> None:
    """The contract's numbers, once, in plain arithmetic: two micro-batches of 2 and 3 images, 4 and 6 targets."""
    model = mlp()
    session = session_of(model, sgd(model), 2)
    session.micro_batch(2)
    first = session.batch_mean(2, 4.0)
    session.micro_batch(3)
    second = session.batch_mean(3, 6.0)
    power = session.window.state_dict()["power"][""]
    assert (first, second) == (4 / 2 * power, 6 / 3 * power)
    assert session.window.factors()[""] * power == pytest.approx(5 / 10)
