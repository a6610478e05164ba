"""Training and validation loss of a run, from the host's own `log_history`, which a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from integrations.contract import LossFacts


def read_losses(log_history: Iterable[Mapping[str, Any]], into: LossFacts) -> None:
    """Fill in `loss` and `eval_loss`; with several evaluation sets the first `eval_NAME_loss` of an entry.

    Args:
        log_history: entries with `step`, as `TrainerState` has them.
        into: the report's losses.
    """
    into.unit, into.train, into.valid = "update", [], []
    for entry in log_history:
        for name, value in entry.items():
            curve = into.train if name == "loss" else into.valid if _is_validation(name) else None
            if curve is not None and isinstance(value, Real) and isinstance(entry.get("step"), Real):
                curve.append((float(entry["step"]), float(value)))
                break


def _is_validation(name: str) -> bool:
    return name == "eval_loss" or (name.startswith("eval_") and name.endswith("_loss"))
