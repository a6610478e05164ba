"""An evaluation whose predictions will not fit is named after its first batch."""

from __future__ import annotations

import types

import pytest
import torch

from integrations.huggingface.evaluation_memory import GIB, KeptPredictions


class Evaluating:
    """What is asked of a trainer."""

    def __init__(self, accumulation=None, preprocess=None, device="cpu"):
        self.args = types.SimpleNamespace(device=torch.device(device), eval_accumulation_steps=accumulation)
        self.preprocess_logits_for_metrics = preprocess
        self.steps = 0

    def prediction_step(self, *args, **kwargs):
        self.steps += 1
        return None, (torch.zeros(4, 10, 8), torch.zeros(4, 8)), None


def told(trainer, free, samples=1000):
    lines = []
    loader = types.SimpleNamespace(dataset=range(samples))
    kept = KeptPredictions(trainer, lambda device: free[device.type] / GIB, lines.append)
    with kept.forecast(loader):
        for _ in range(3):
            trainer.prediction_step("model", {})
    assert "prediction_step" not in vars(trainer)
    return lines


NEEDED = 1000 * 88 * 4


def test_it_is_named_once_with_what_to_do():
    (line,) = told(Evaluating(), {"cpu": NEEDED - 1})
    assert line.startswith("evaluation keeps all predictions: 1000 samples x [10, 8], [8] take")
    assert "preprocess_logits_for_metrics" in line
    assert "eval_accumulation_steps" not in line


@pytest.mark.parametrize(
    ("accumulation", "free", "words"),
    [
        (None, {"meta": NEEDED - 1, "cpu": 2 * NEEDED}, "eval_accumulation_steps=16"),
        (16, {"meta": NEEDED - 1, "cpu": NEEDED - 1}, "free on cpu"),
    ],
)
def test_the_device_that_holds_them_counts(accumulation, free, words):
    (line,) = told(Evaluating(accumulation, device="meta"), free)
    assert words in line


@pytest.mark.parametrize(
    ("trainer", "free"),
    [
        (Evaluating(), {"cpu": NEEDED}),
        (Evaluating(preprocess=lambda logits, labels: logits.argmax(-1)), {"cpu": 1}),
        (Evaluating(16, device="meta"), {"meta": 1, "cpu": NEEDED}),
    ],
)
def test_what_fits_or_is_made_small_is_not(trainer, free):
    assert told(trainer, free) == []
    assert trainer.steps == 3
