"""The number of terms of each head's loss, against the head itself: parts of a batch must add up to the whole."""

from __future__ import annotations

import pytest
import torch

from integrations.huggingface.loss_rules.counting import Counting, for_model, problem_type
from integrations.huggingface.loss_rules.head_probe import HOST, LATER, probe, take_rows
from tests.huggingface.heads import HEADS, batch_for, model_for


@pytest.mark.parametrize("head", HEADS)
def test_weighted_means_of_parts_are_the_mean_of_the_whole(head):
    model, batch = model_for(head).eval(), batch_for(head, 5, uneven=True)
    rule = for_model(model, batch)
    assert rule is not None, head
    with torch.no_grad():
        whole = model(**batch).loss.double()
        parts = [take_rows(batch, a, b) for a, b in ((0, 1), (1, 3), (3, 5))]
        counts = [rule.count(part) for part in parts]
        losses = [model(**part).loss.double() for part in parts]
    total = sum(counts)
    assert total == rule.count(batch)
    mean = sum(n / total * loss for n, loss in zip(counts, losses, strict=True) if n)
    assert mean == pytest.approx(float(whole), rel=2e-6)


def test_problem_type_is_chosen_as_the_head_chooses_it():
    model = model_for("bert-sequence")
    for labels, number in ((torch.tensor([1, 2]), 3), (torch.rand(2, 3), 3), (torch.rand(2), 1)):
        model.config.problem_type = None
        model.config.num_labels = number
        assert (
            problem_type(model.config, labels)
            == {
                (torch.int64, 3): "single_label_classification",
                (torch.float32, 3): "multi_label_classification",
                (torch.float32, 1): "regression",
            }[labels.dtype, number]
        )


def test_answers_outside_the_input():
    rule = Counting("positions")
    batch = {
        "input_ids": torch.zeros(3, 8, dtype=torch.long),
        "start_positions": torch.tensor([1, 8, 9]),
        "end_positions": torch.tensor([2, 8, 3]),
    }
    assert rule.count(batch) == 1
    assert rule.loses(batch)
    assert not rule.loses({**batch, "end_positions": torch.tensor([2, 8, 9])})


def test_a_model_of_the_user_is_not_known():
    assert for_model(torch.nn.Linear(2, 2)) is None


def _losses():
    cross = torch.nn.functional.cross_entropy

    def mean(logits, labels, number):
        return cross(logits.flatten(0, -2), labels.flatten())

    def counted(logits, labels, number):
        if number is None:
            raise TypeError("needs a count")
        return cross(logits.flatten(0, -2), labels.flatten(), reduction="sum") / number

    def squared(logits, labels, number):
        return mean(logits, labels, number) ** 2

    def summed(logits, labels, number):
        return cross(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    return {"mean": mean, "counted": counted, "squared": squared, "summed": summed}


@pytest.mark.parametrize(
    ("kind", "found"), [("mean", "tokens"), ("counted", HOST), ("squared", None), ("summed", "sum")]
)
def test_probe_finds_how_a_custom_loss_adds_up(kind, found):
    model, batch = model_for("bert-token"), batch_for("bert-token", 4, uneven=True)
    loss = _losses()[kind]
    state = torch.get_rng_state()

    def ask(inputs, number):
        labels = inputs.pop("labels")
        return loss(model(**inputs).logits, labels, number)

    answer = probe(ask, batch, model)
    assert (answer.kind if isinstance(answer, Counting) else answer) == found
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_that_is_not_finite_tells_nothing_yet():
    batch = batch_for("bert-token", 4, uneven=True)
    assert probe(lambda inputs, number: torch.tensor(float("nan")), batch, model_for("bert-token")) == LATER
