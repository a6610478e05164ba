"""Precision and memory format from the settings, and the trials of them, under the Trainer."""

from __future__ import annotations

import pytest
import torch

from integrations.huggingface.compiling import in_place_zeros
from tests import reference
from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.runs import report, trainer_for

pytestmark = pytest.mark.usefixtures("fresh")


def test_the_plan_is_tried_without_a_trace(tmp_path):
    """Twenty updates with the planner at work end with the same weights as without it (case pytorch#98102)."""
    runs = {}
    for plan in ("off", "auto"):
        trainer, spy = trainer_for(
            "bert-token",
            tmp_path / plan,
            8,
            options={"plan": plan, "cache_dir": str(tmp_path / "cache")},
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=20,
        )
        trainer.train()
        runs[plan] = spy.weights[-1]
    assert all(torch.equal(runs["auto"][name], runs["off"][name]) for name in runs["off"])
    found = report(tmp_path / "auto")
    assert (found["compile"]["decision"], found["compile"]["graphs"], found["speed"]["plan"]) == ("eager", 0, "host")
    assert found["compile"]["reason"]


def test_precision_from_the_settings(tmp_path):
    seen = []
    trainer, _ = trainer_for(
        "bert-token", tmp_path, 4, options={"precision": "bf16"}, per_device_train_batch_size=4, max_steps=1
    )
    trainer.model.bert.encoder.layer[0].output.dense.register_forward_hook(
        lambda m, i, o: seen.append(o.dtype) if m.training else None
    )
    trainer.train()
    assert seen == [torch.bfloat16]
    assert report(tmp_path)["speed"]["precision"] == "bf16"
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_channels_last_from_the_settings(tmp_path):
    trainer, spy = trainer_for(
        "resnet-image",
        tmp_path,
        4,
        options={"memory_format": "channels_last", "batchnorm": "freeze", "ema": 0.5},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
    )
    seen = []
    first = next(m for m in trainer.model.modules() if isinstance(m, torch.nn.Conv2d))
    first.register_forward_hook(
        lambda m, i, o: seen.append(o.is_contiguous(memory_format=torch.channels_last)) if m.training else None
    )
    trainer.train()
    assert all(seen)
    assert len(seen) == 2

    def loss(model, batch):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        return model(**batch).loss

    right = reference.gradients(model_for("resnet-image"), batch_for("resnet-image", 4), loss)
    assert reference.difference(spy.gradients[0], right) <= 2e-6
    assert first.weight.is_contiguous()


def test_gradients_are_zeroed_in_place_only_while_cuda_graphs_run():
    model, keeps = torch.nn.Linear(2, 2), [False]
    held = in_place_zeros(model, type("Run", (), {"keeps_gradients": property(lambda run: keeps[0])})())
    for keep in (False, True, False):
        keeps[0] = keep
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        assert [p.grad is not None and not p.grad.any() for p in model.parameters()] == [keep, keep]
    held.undo()
    assert "zero_grad" not in vars(model)
