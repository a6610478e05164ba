from __future__ import annotations

from typing import Any

import pytest
import torch

from plugins.core.session import Session
from tests import reference
from tests.core.step.updates import SGD, gradients_at_step, norm
from tests.core.tiny import FORMS, batches, feed, joined, mlp, same, session_of


def run_for_gradients(options: dict[str, Any], host_clip: float | None) -> tuple[Session, list[list[torch.Tensor]]]:
    model, parts = mlp(7, torch.float64), batches(7, [2, 3, 4, 1], torch.float64)
    optimizer = SGD(model.parameters())
    seen = gradients_at_step(optimizer)
    session = session_of(model, optimizer, 4, options, clip_norm=host_clip)
    for part in parts:
        feed(session, model, part)
    return session, seen


def test_clip_off_leaves_gradients_untouched() -> None:
    model, parts = mlp(7, torch.float64), batches(7, [2, 3, 4, 1], torch.float64)
    right = reference.gradients(model, joined(parts), FORMS["mean"][0])
    session, (seen,) = run_for_gradients({"clip_norm": "off"}, host_clip=1e-3)
    assert reference.difference(dict(zip(right, seen, strict=True)), right) <= 1e-12
    assert session.series.norms[0] == pytest.approx(norm(list(right.values())), rel=1e-9)
    assert session.series.clipped == 0


@pytest.mark.parametrize(("options", "host"), [({"clip_norm": 0.1}, None), ({}, 0.1), ({"clip_norm": 0.1}, 10.0)])
def test_the_norm_is_measured_after_accumulation(options: dict[str, Any], host: float | None) -> None:
    session, (seen,) = run_for_gradients(options, host)
    _, (free,) = run_for_gradients({"clip_norm": "off"}, None)
    assert norm(seen) == pytest.approx(0.1, rel=1e-4)
    assert session.series.norms[0] == pytest.approx(norm(free), rel=1e-9)
    scale = norm(seen) / norm(free)
    assert all(torch.allclose(a, b * scale, rtol=1e-9, atol=0) for a, b in zip(seen, free, strict=True))
    assert session.series.clipped == 1


def test_a_gradient_under_the_norm_is_not_touched() -> None:
    session, (seen,) = run_for_gradients({"clip_norm": 1000.0}, None)
    _, (free,) = run_for_gradients({"clip_norm": "off"}, None)
    assert same(seen, free)
    assert session.series.clipped == 0
