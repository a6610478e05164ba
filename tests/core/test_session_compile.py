from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plugins.core.compile.compiled_module import CompileRefused
from tests.core.sessions import ON, listeners, sgd
from tests.core.tiny import batches, fault, feed, mlp, same, session_of, snapshot

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
