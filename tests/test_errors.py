"""One root for what a user can cause, and one place where a refusal becomes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from integrations.contract import UnsupportedRun
from integrations.easyocr.errors import EasyOCRError
from integrations.refusal import Refusal
from plugins.core.autotune.plan_cache import CacheError
from plugins.core.autotune.plan_file import PlanError
from plugins.core.checkpoint.run_lock import FolderInUse
from plugins.core.checkpoint.sidecar import DamagedState
from plugins.core.compile.compiled_module import CompileRefused
from plugins.core.step.precision import Unsupported
from plugins.core.step.update import NonFiniteGradient
from plugins.errors import AccelError, refusals_as_errors

ROOT = Path(__file__).parents[1]
OF_THE_CORE = (CacheError, CompileRefused, DamagedState, FolderInUse, NonFiniteGradient, PlanError, Unsupported)


@pytest.mark.parametrize("kind", OF_THE_CORE)
def test_an_error_of_the_core_is_an_accel_error_and_passes_unchanged(kind: type[AccelError]) -> None:
    with pytest.raises(AccelError) as caught, refusals_as_errors():
        raise kind("field=1: not\n  so")
    assert type(caught.value) is kind
    assert str(caught.value) == "field=1: not so"


@pytest.mark.parametrize("kind", [Refusal, UnsupportedRun, EasyOCRError])
def test_a_refusal_of_an_adapter_becomes_an_accel_error_of_the_same_line(kind: type[Refusal]) -> None:
    with pytest.raises(AccelError, match=r"^field=1: not so$") as caught, refusals_as_errors():
        raise kind("field=1: not\n  so")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_another_error_passes_unchanged() -> None:
    with pytest.raises(ValueError, match="the user's own") as caught, refusals_as_errors():
        raise ValueError("the user's own")
    assert not isinstance(caught.value, AccelError)


@pytest.mark.parametrize("path", sorted((ROOT / "plugins").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_refusal_is_caught_in_one_place_only(path: Path) -> None:
    caught = {
        name.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for name in ast.walk(node.type)
        if isinstance(name, ast.Name)
    }
    allowed = {"Refusal"} if path == ROOT / "plugins" / "errors.py" else set()
    assert caught & {"Refusal", "UnsupportedRun", "EasyOCRError"} == allowed
