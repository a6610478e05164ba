"""Updates that must not happen, clipping, and updates that do not fit into memory."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

from integrations.huggingface import versions
from plugins.core.step.update import Update
from tests import reference
from tests.huggingface.heads import Rows, batch_for
from tests.huggingface.plugged import RUN_PATCHES, SPLIT, right_gradients
from tests.huggingface.runs import report, trainer_for

# -- updates that must not happen, clipping --


class Poisoned(Rows):
    """Row `at` makes the loss NaN: an embedding of NaN is looked up through `inputs_embeds`."""

    def __init__(self, batch, at, width=16):
        torch.manual_seed(0)
        size, length = batch["input_ids"].shape
        batch = {k: v for k, v in batch.items() if k != "input_ids"} | {
            "inputs_embeds": torch.randn(size, length, width)
        }
        batch["inputs_embeds"][at] = float("nan")
        super().__init__(batch)


def test_a_nan_micro_batch_is_reported_and_skipped(tmp_path):
    rows = Poisoned(batch_for("bert-token", 12, uneven=True), at=6)
    trainer, spy = trainer_for(
        "bert-token",
        tmp_path,
        12,
        batch=rows,
        options={"ema": 0.5},
        optim="adamw_torch",
        weight_decay=0.1,
        **{**SPLIT, "max_steps": 3},
    )
    trainer.train()
    first, second, third = spy.weights
    assert all(torch.equal(second[n], first[n]) for n in first)
    assert any(not torch.equal(third[n], second[n]) for n in second)
    assert all(torch.isfinite(t).all() for t in trainer.model.state_dict().values())
    found = report(tmp_path)
    assert (found["window"]["updates"], found["window"]["skipped_updates"], found["ema"]["updates"]) == (2, 1, 2)
    assert any(line == "step 2: the loss of micro-batch 3 is not finite" for line in found["warnings"])
    assert trainer.lr_scheduler.last_epoch == 2


def test_nonfinite_stop(tmp_path):
    rows = Poisoned(batch_for("bert-token", 4), at=0)
    trainer, _ = trainer_for("bert-token", tmp_path, 4, batch=rows, options={"nonfinite": "stop"}, **SPLIT)
    with pytest.raises(RuntimeError, match="nonfinite=stop"):
        trainer.train()
    assert not RUN_PATCHES & set(vars(trainer))


@pytest.mark.parametrize(
    ("clip", "host", "bound"), [("host", 0.3, 0.3), (0.2, 1.0, 0.2), ("off", 0.3, None), ("host", 0.0, None)]
)
def test_clip_once_a_window_and_log_the_true_norm(clip, host, bound, tmp_path):
    trainer, spy = trainer_for(
        "bert-token", tmp_path, 4, options={"clip_norm": clip}, **{**SPLIT, "max_grad_norm": host}
    )
    trainer.train()
    right = float(torch.nn.utils.get_total_norm(right_gradients().values()))
    assert right > 0.3
    assert spy.norms == [pytest.approx(bound or right, rel=1e-4)]
    if host or versions.GRAD_NORM.here:  # an older host logs no norm where it clips nothing
        assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(right, rel=1e-5)
    assert trainer.args.max_grad_norm == host


# -- memory --


def test_out_of_memory_keeps_the_effective_batch(tmp_path):
    seen = []

    class Tight(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            seen.append(len(inputs["input_ids"]))
            if seen[-1] > 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return super().training_step(model, inputs, *args, **kwargs)

    trainer, spy = trainer_for(
        "bert-token",
        tmp_path,
        16,
        kind=Tight,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=2,
        auto_find_batch_size=True,
    )
    trainer.train()
    assert seen == [8, *[4] * 8]
    assert reference.difference(spy.gradients[0], right_gradients(size=16)) <= 1e-6
    facts = report(tmp_path)
    assert (facts["window"]["accumulate"], facts["window"]["micro_batch"], facts["window"]["updates"]) == (4, 4, 2)
    assert any("8 x 2 becomes 4 x 4" in line for line in facts["warnings"])
    assert trainer.args.gradient_accumulation_steps == 2


def test_out_of_memory_as_an_update_begins_is_the_host_s_to_retry(tmp_path, monkeypatch):
    def tight(self, *args, **kwargs):
        if trainer._train_batch_size > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return ready(self, *args, **kwargs)

    ready = Update.prepare_update
    monkeypatch.setattr(Update, "prepare_update", tight)
    trainer, spy = trainer_for("bert-token", tmp_path, 16, max_steps=1, auto_find_batch_size=True,
                               per_device_train_batch_size=8, gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    assert reference.difference(spy.gradients[0], right_gradients(size=16)) <= 1e-6
    assert report(tmp_path)["window"]["micro_batch"] == 4


def test_where_no_batch_fits_the_host_s_own_words_are_said(tmp_path):
    class Never(Trainer):
        def training_step(self, *args, **kwargs):
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer, _ = trainer_for("bert-token", tmp_path, 4, kind=Never, max_steps=1, auto_find_batch_size=True,
                             per_device_train_batch_size=2)  # fmt: skip
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        trainer.train()
