from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from plugins.core.session import Session
from plugins.core.step.ema import EMA
from plugins.core.step.update import NonFiniteGradient
from tests.core.step.updates import SGD, poisoned
from tests.core.tiny import batches, feed, mlp, same, session_of, snapshot


def everything(session: Session, model: nn.Module, shadow: EMA) -> Any:
    state = session.update.optimizer.state_dict()["state"]
    return snapshot(model), {k: dict(v) for k, v in state.items()}, shadow.updates, shadow.state_dict()["shadow"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [2, 3])
def test_a_nonfinite_window_leaves_no_trace(at: int, value: float) -> None:
    """Weights, momentum, average, its counter and BatchNorm's statistics stay bitwise what they were."""
    model = mlp(9, norm=True)
    parts = poisoned(batches(9, [3, 4, 3, 4, 3, 4]), at, value)
    said: list[str] = []
    shadow = EMA(model, 0.9)
    session = session_of(model, SGD(model.parameters()), 2, said=said, average=shadow)
    for part in parts[:2]:
        feed(session, model, part)
    kept = io.BytesIO()
    torch.save(everything(session, model, shadow), kept)
    kept.seek(0)
    for part in parts[2:4]:
        outcome = feed(session, model, part)
    assert not outcome.stepped
    assert same(list(everything(session, model, shadow)), list(torch.load(kept, weights_only=True)))
    assert all(p.grad is None for p in model.parameters())
    for part in parts[4:]:
        outcome = feed(session, model, part)
    assert outcome.stepped
    facts = session.report.window
    assert (facts.updates, facts.skipped_updates, shadow.updates) == (2, 1, 2)
    assert sum("update 1" in line and "skipped" in line for line in said) == 1
    assert all(bool(t.isfinite().all()) for t in snapshot(model).values())


def test_a_run_of_skipped_updates_does_not_fill_the_report() -> None:
    model = mlp()
    session = session_of(model, SGD(model.parameters()), 1)
    for _ in range(50):
        feed(session, model, poisoned(batches(1, [2]), 0)[0])
    assert session.report.window.skipped_updates == 50
    assert 1 <= len(session.report.warnings) <= 10


def test_twenty_skipped_updates_in_a_row_are_told_once() -> None:
    model = mlp()
    said: list[str] = []
    session = session_of(model, SGD(model.parameters()), 1, said=said)
    good, bad = batches(1, [2])[0], poisoned(batches(1, [2]), 0)[0]

    def told() -> int:
        return sum("20 updates in a row were skipped" in line for line in said)

    for part in [bad] * 19 + [good] + [bad] * 19:
        feed(session, model, part)
    assert told() == 0
    feed(session, model, bad)
    assert told() == 1
    for part in [bad] * 5 + [good] + [bad] * 25:
        feed(session, model, part)
    assert told() == 1


def test_stop_raises_and_leaves_weights_average_and_statistics() -> None:
    model = mlp(9, norm=True)
    shadow = EMA(model, 0.9)
    session = session_of(model, SGD(model.parameters()), 2, {"nonfinite": "stop"}, average=shadow)
    before = snapshot(model)
    parts = poisoned(batches(9, [3, 4]), 1)
    feed(session, model, parts[0])
    with pytest.raises(NonFiniteGradient, match="nonfinite=stop"):
        feed(session, model, parts[1])
    assert same(snapshot(model), before)
    assert shadow.updates == 0
