"""Adapters and loops use of a session what the contract declares, and nothing else."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from integrations import contract
from plugins.config import AccelConfig
from plugins.core.session import RunSpec, Session
from tests.hosts import RUNS, killed

ROOT = Path(__file__).parents[1]
ROOMS = ("integrations", "plugins/loop", "plugins/easyocr")
USERS = [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if p.parent.name != "contract"]
USERS = [*USERS, *(ROOT / "plugins" / name for name in ("yolo.py", "hf.py"))]
REFUSED: list[str] = []  # what was reached for in vain
OWN = {"config", "host", "model", "optimizer", "say", "packages"}  # of a RunSpec: by position, or the plug's


def members(declared: type) -> dict[str, Any]:
    """What a protocol declares, by name: properties, functions, or the types of plain attributes."""
    found: dict[str, Any] = {}
    for base in reversed([c for c in declared.__mro__ if c.__module__.startswith("integrations.contract")]):
        found |= dict.fromkeys(inspect.get_annotations(base), Any)
        found |= {n: v for n, v in vars(base).items() if not n.startswith("_")}
    return found


class Strict:
    """A value of which only what a protocol declares can be reached; so with what it gives in turn."""

    def __init__(self, value: Any, declared: type) -> None:
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_declared", declared)

    def __getattr__(self, name: str) -> Any:
        declared = members(self._declared)
        if name not in declared:
            REFUSED.append(f"{self._declared.__name__}.{name}")
            raise AttributeError(f"{REFUSED[-1]} is not in the contract")
        value, member = getattr(self._value, name), declared[name]
        if isinstance(member, property):
            return strict(value, returned(member.fget))
        if not inspect.isfunction(member):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            kind = returned(member)
            bare = [bare_of(a) for a in args], {n: bare_of(a) for n, a in kwargs.items()}
            return strict(value(*bare[0], **bare[1]), self._declared if isinstance(kind, typing.TypeVar) else kind)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if inspect.isroutine(found := members(self._declared).get(name)) or isinstance(found, (property, type(None))):
            raise AttributeError(f"{self._declared.__name__}.{name} may not be set")
        setattr(self._value, name, value)


def returned(function: Any) -> Any:
    return get_type_hints(function).get("return")


def strict(value: Any, hint: Any) -> Any:
    kinds = get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    declared = next(
        (k for k in kinds if getattr(k, "_is_protocol", False) and k.__module__.startswith("integrations.contract.")),
        None,
    )
    return Strict(value, declared) if declared is not None and value is not None else value


def bare_of(value: Any) -> Any:
    return value._value if isinstance(value, Strict) else value


@pytest.fixture
def session() -> Session:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(RunSpec(AccelConfig(compile="off"), "test", model, optimizer, torch.device("cpu"), 4, 2))


def test_nothing_but_the_contract_is_reached(session: Session) -> None:
    held: Any = Strict(session, contract.Session)
    assert held.window.empty
    assert held.config.nonfinite == "skip"
    held.report.ema.decay = 0.5
    assert session.report.ema.decay == 0.5
    for reach in (
        lambda: held.tuner,
        lambda: held.window._totals,
        lambda: held.report.gradients,
        lambda: held.run_state().without("model")._parts,
        lambda: setattr(held, "compilation", None),
        lambda: setattr(held.window, "expected", 3),
    ):
        with pytest.raises(AttributeError):
            reach()
    session.end()


@pytest.mark.parametrize("host", RUNS)
def test_a_host_s_run_needs_nothing_but_the_contract(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Session] = []
    REFUSED.clear()

    def new_session(spec: RunSpec) -> Any:
        built.append(Session(spec))
        return Strict(built[-1], contract.Session)

    for plug in ("plugins.host_tools", "plugins.loop.accelerated"):
        monkeypatch.setattr(f"{plug}.Session", new_session)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    options = {"accumulate": 2, "ema": 0.9, "plan": "auto"}
    with killed():
        RUNS[host](tmp_path / "run", 9, stop=2, nan=2, **options)
    ran = RUNS[host](tmp_path / "again", 9, resume=tmp_path / "run", **options)
    assert len(built) == 2
    assert REFUSED == []  # nor was it reached for where an error would be caught
    assert ran.window["skipped_updates"] == 1


def test_the_session_fulfils_the_contract(session: Session) -> None:
    """mypy checks the types, in `plugins.host_tools`."""
    for name, member in members(contract.Session).items():
        assert hasattr(session, name), name
        if inspect.isfunction(member):
            asked = list(inspect.signature(member).parameters.values())[1:]
            answered = list(inspect.signature(getattr(session, name)).parameters.values())
            assert [(p.name, p.kind) for p in asked] == [(p.name, p.kind) for p in answered], name
    session.end()


def test_a_new_session_takes_what_a_run_is_made_of() -> None:
    asked = inspect.signature(contract.NewSession.__call__).parameters
    keywords = {n for n, p in asked.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {field.name for field in fields(RunSpec)} - OWN


def test_nothing_is_declared_that_nobody_uses() -> None:
    trees = [
        ast.parse(p.read_text(encoding="utf-8"))
        for p in USERS
        if not p.is_relative_to(ROOT / "integrations" / "contract")
    ]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not members(contract.Session).keys() - used
