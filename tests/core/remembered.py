"""What a run keeps in the cache, for tests that need an entry."""

from __future__ import annotations

from typing import Any

from plugins.core.autotune.background_compile import CompileFindings
from plugins.core.plan import Plan


def entry(plan: Plan | None = None, **changed: Any) -> dict[str, Any]:
    return {
        "plan": (plan or Plan("bf16")).as_dict(),
        "tried": 3,
        "step_seconds": 0.5,
        "compile": CompileFindings(settled=True).as_dict(),
        "code": [],
        "candidates": [],
        "device": "cpu",
        "torch": "2.14.1",
        "parameters": 3011238,
        **changed,
    }
