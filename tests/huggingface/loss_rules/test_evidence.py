"""What is learnt of a user's calls is asked of the device a few times a run, and not in every micro-batch."""

from __future__ import annotations

import pytest
import torch

from integrations.huggingface.loss_rules import evidence as module
from integrations.huggingface.loss_rules.evidence import TRIES, Evidence
from integrations.huggingface.loss_rules.observation import Seen


def passed(loss: float, own: float) -> Seen:
    """A call that went on to the host's, whose model gave `own`, of which the host made `loss`."""
    call = Seen({}, 4, outputs=[{"loss": torch.tensor(loss)}], own=torch.tensor(own))
    return Seen({}, 4, passed=[call])


def test_what_the_host_multiplied_by_is_told_by_the_first_finite_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ranks", lambda: 2)
    evidence = Evidence(1e-6)
    calls = [(0.0, 0.0), (3.0, 1.5), (9.0, 1.0)]  # the last would tell something else, and is not asked
    assert [evidence.multiplied(passed(*call)) for call in calls] == [1.0, 2.0, 2.0]
    assert evidence.multiplied(Seen({}, 4)) == 1.0  # this one did not go on to the host's


def test_a_count_of_which_no_call_tells_anything_is_looked_for_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evidence, asked = Evidence(1e-6), []
    monkeypatch.setattr(evidence, "_leaves_count", asked.append)
    assert all(evidence.uses_count(passed(1.0, 1.0)) for _ in range(3 * TRIES))  # so left the host's way
    assert len(asked) == TRIES
