from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.callback as compile_callbacks
from torch import nn

from plugins.core.compile.compiled_module import CompileRefused
from tests.core.tiny import batches, fault, feed, mlp, same, session_of, snapshot

ON = {"compile": "on", "compile_backend": "eager"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def listeners() -> int:
    handler = compile_callbacks.callback_handler
    return len(handler.start_callbacks) + len(handler.end_callbacks)


# -- compile and its budget ---------------------------------------------------------------------------------------


def test_auto_stays_eager_and_says_why() -> None:
    model = mlp()
    session = session_of(model, sgd(model), options={"compile": "auto"})
    assert model._compiled_call_impl is None
    assert session.report.compile.decision == "eager"
    assert "auto" in session.report.compile.reason
    assert session.report.warnings == []


def test_on_compiles_the_whole_forward_and_counts_it() -> None:
    model, eager = mlp(), mlp()
    session, plain = session_of(model, sgd(model), 2, ON), session_of(eager, sgd(eager), 2)
    for part in batches(0, [4] * 6):
        feed(session, model, part)
        feed(plain, eager, part)
    data = json.loads(session.write_report(Path.cwd()).read_text())["compile"]
    assert (data["decision"], data["graphs"], data["recompiles"], data["graph_breaks"]) == ("whole", 1, 0, 0)
    assert data["phases"] == {"train": 1}
    assert same(snapshot(model), snapshot(eager))


def test_over_the_budget_the_run_goes_on_eagerly_from_a_windows_close() -> None:
    """Batch sizes are the shapes; the third meets a full cache: torch would run it eagerly without a word."""
    said: list[str] = []
    model, eager = mlp(), mlp()
    session = session_of(model, sgd(model), 2, {**ON, "recompile_budget": 2, "dynamic": "static"}, said)
    plain = session_of(eager, sgd(eager), 2)
    active = []
    for part in batches(0, [2, 3, 4, 5, 6, 7]):
        feed(session, model, part)
        feed(plain, eager, part)
        active.append(model._compiled_call_impl is not None)
    assert active == [True, True, True, False, False, False]
    assert sum("eagerly" in line and "limit" in line for line in said) == 1
    assert session.report.compile.decision == "eager"
    assert session.monitor.graphs == 2
    assert same(snapshot(model), snapshot(eager))


def test_graphs_of_a_compiled_validation_do_not_take_training_s_budget() -> None:
    said: list[str] = []
    model, average = mlp(), mlp()
    session = session_of(model, sgd(model), 1, {**ON, "validate": "compiled", "recompile_budget": 1}, said)
    feed(session, model, batches(0, [4])[0])
    assert session.report.compile.decision == "whole"
    session.compile_validation(average)
    with session.validation(), torch.no_grad():
        average(torch.zeros(4, 3))
    feed(session, model, batches(0, [4])[0])
    assert model._compiled_call_impl is not None
    assert said == []
    assert session.series.compiled_at == [1]


def test_an_error_of_the_compiler_is_one_warning_and_an_eager_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such op")

    from torch._dynamo import register_backend
    from torch._dynamo.backends.registry import list_backends

    if "broken" not in list_backends():
        register_backend(broken, name="broken")
    said: list[str] = []
    model, eager = mlp(norm=True), mlp(norm=True)
    session = session_of(model, sgd(model), 2, {"compile": "on", "compile_backend": "broken"}, said)
    plain = session_of(eager, sgd(eager), 2)
    for part in batches(0, [4] * 4):
        feed(session, model, part)
        feed(plain, eager, part)
    assert sum("no such op" in line and "eagerly" in line for line in said) == 1
    assert session.report.compile.decision == "eager"
    assert session.report.window.updates == 2
    assert same(snapshot(model), snapshot(eager))


def test_a_missing_compiler_and_an_uncompilable_model_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("No C++ compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    model = mlp()
    missing = session_of(model, sgd(model), options={"compile": "on"})
    assert "No C++ compiler" in missing.report.warnings[0]
    labels = session_of(model, sgd(model), options=ON, uncompilable="labels go into the forward")
    assert "labels go into the forward" in labels.report.warnings[0]
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("part", ["", "1"])
@pytest.mark.parametrize("compile_", ["auto", "on"])
def test_a_model_that_its_owner_compiled_is_left_alone(compile_: str, part: str) -> None:
    model, said = blocks(), list[str]()
    module = model.get_submodule(part)
    module.compile(backend="eager")
    theirs = module._compiled_call_impl
    held = session_of(model, sgd(model), 1, {"compile": compile_, "precision": "auto"}, said)
    assert held.tuner.state == "done"
    held.end()
    assert "compiled already, by its owner" in held.report.compile.reason
    assert [line.endswith("the run goes on as it is") for line in said] == ([True] if compile_ == "on" else [])
    assert compiled_names(model) == [part]
    assert module._compiled_call_impl is theirs


def test_a_compiled_wrapper_is_its_owners_too() -> None:
    model = nn.Sequential(torch.compile(mlp(), backend="eager"))  # type: ignore[arg-type]
    assert session_of(model, sgd(model), 1, {"compile": "auto"}).compilation.owned


def test_compile_asked_inside_autocast_is_refused_and_leaves_nothing_behind() -> None:
    model, before = mlp(norm=True), listeners()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CompileRefused, match="autocast"):
        session_of(model, sgd(model), 4, {**ON, "batchnorm": "momentum"})
    assert model._compiled_call_impl is None
    assert model.norm.momentum == 0.1
    assert listeners() == before


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)])


def compiled_names(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if m._compiled_call_impl is not None]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, [""]),
        ({"compile_scope": "regional"}, ["0", "1", "2"]),
        ({"compile_scope": "regional", "compile_exclude": "1"}, ["0", "2"]),
        ({"compile_scope": "0,2*", "compile_exclude": "2.*"}, ["0", "2"]),
    ],
)
def test_the_scope(options: dict[str, Any], names: list[str]) -> None:
    model = blocks()
    session = session_of(model, sgd(model), options={**ON, **options})
    assert compiled_names(model) == names
    session.end()
    assert compiled_names(model) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile_scope": "nothing*"}, "compile_scope=nothing*"),
        ({"compile_scope": "regional", "compile_exclude": "*"}, "no repeated blocks"),
        ({"compile_exclude": "0"}, "compile_exclude=0"),
    ],
)
def test_a_scope_that_means_nothing_is_refused(options: dict[str, Any], words: str) -> None:
    model = blocks()
    with pytest.raises(CompileRefused) as caught:
        session_of(model, sgd(model), options={**ON, **options})
    assert words in str(caught.value)
    assert compiled_names(model) == []


# -- validation ---------------------------------------------------------------------------------------------------


def test_validation_adds_no_graph_to_training() -> None:
    model = mlp()
    session = session_of(model, sgd(model), 1, {**ON, "dynamic": "static"})
    feed(session, model, batches(0, [4])[0])
    for _ in range(2):
        with session.validation(), torch.no_grad():
            model.eval()
            model(torch.zeros(7, 3))
            model.train()
        feed(session, model, batches(0, [4])[0])
    assert session.monitor.graphs == 1
    assert session.monitor.phases() == {"train": 1}
    assert model._compiled_call_impl is not None


def test_a_run_that_gave_up_stays_eager_after_validation() -> None:
    model = mlp()
    session = session_of(model, sgd(model), 1, ON)
    session.compilation.stay_eager(fault("for a reason"))
    with session.validation():
        pass
    model(torch.zeros(2, 3))
    assert session.monitor.graphs == 0


def test_a_compiled_validation_model_is_compiled_once_and_falls_back_alone() -> None:
    model, average = mlp(), mlp()
    session = session_of(model, sgd(model), 1, {**ON, "validate": "compiled"})
    for _ in range(2):
        session.compile_validation(average)
        with session.validation(), torch.no_grad():
            average(torch.zeros(4, 3))
    assert session.monitor.phases() == {"validation": 1}
    session.compilation._validated[0].give_up(fault("oops"))
    assert any("validation runs eagerly: oops" in w for w in session.report.warnings)
    assert model._compiled_call_impl is not None
    session.end()
    assert average._compiled_call_impl is None
    other = session_of(mlp(), sgd(model), 1, ON)
    other.compile_validation(average)
    assert average._compiled_call_impl is None


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
