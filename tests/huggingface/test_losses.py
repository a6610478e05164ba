"""The host's log history as curves of losses."""

from __future__ import annotations

from integrations.huggingface.losses import read_losses
from plugins.core.telemetry.losses import LossFacts


def test_loss_and_eval_loss_are_read_at_their_steps() -> None:
    facts = LossFacts()
    history = [
        {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": 0.5, "step": 5},
        {"loss": 2, "step": 10},
        {"eval_loss": 2.25, "eval_runtime": 1.0, "step": 10},
        {"train_loss": 2.1, "train_runtime": 3.0, "step": 10},
    ]
    for _ in range(2):  # however often the report is written
        read_losses(history, facts)
    assert (facts.unit, facts.train, facts.valid) == ("update", [(5, 2.5), (10, 2.0)], [(10, 2.25)])


def test_of_several_evaluation_sets_each_entry_gives_one_loss() -> None:
    facts = LossFacts()
    read_losses([{"eval_first_loss": 1.0, "eval_second_loss": 2.0, "step": 3}], facts)
    assert facts.valid == [(3, 1.0)]


def test_what_users_log_is_no_loss() -> None:
    facts = LossFacts()
    read_losses([{"loss": "low", "step": 1}, {"loss": 1.0}, {"my_loss": 1.0, "step": 2}, {}], facts)
    assert (facts.train, facts.valid) == ([], [])
