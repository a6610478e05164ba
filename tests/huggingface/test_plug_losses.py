"""The plug beside every way to a loss: a subclass, a function, smoothing, adapters, the model's own."""

from __future__ import annotations

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from plugins.hf import AccelCallback
from tests import reference
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.plugged import SPLIT, right_gradients
from tests.huggingface.runs import LOGGED, Spy, arguments, losses, report, trainer_for


def test_subclass_with_its_own_loss(tmp_path):
    cross = torch.nn.functional.cross_entropy

    class Mean(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = cross(outputs.logits.flatten(0, 1), labels.flatten())
            return (loss, outputs) if return_outputs else loss

    class Odd(Mean):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            return (found[0] ** 2, found[1]) if isinstance(found, tuple) else found**2

    split = {**SPLIT, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer, spy = trainer_for("bert-token", tmp_path, 4, kind=Mean, **split)
    trainer.train()
    assert reference.difference(spy.gradients[0], right_gradients()) <= 1e-6
    assert report(tmp_path)["window"]["exact"] is True
    trainer, _ = trainer_for("bert-token", tmp_path, 4, kind=Odd, **split)
    trainer.train()
    assert report(tmp_path)["window"]["approximate_terms"] == [
        "compute_loss hides how many terms its mean has; weighted as the host does"
    ]


@pytest.mark.parametrize("counts", [True, False])
def test_compute_loss_func(counts, tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        way = "sum" if counts else "mean"
        found = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction=way)
        return found / num_items_in_batch if counts else found

    trainer, spy = trainer_for(
        "bert-token",
        tmp_path,
        4,
        extra={"compute_loss_func": loss},
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert reference.difference(spy.gradients[0], right_gradients()) <= 1e-6
    assert report(tmp_path)["window"]["exact"] is True


@pytest.mark.parametrize("head", ["bert-token", "gpt2-causal", "bert-sequence"])
def test_label_smoothing(head, tmp_path):
    trainer, spy = trainer_for(head, tmp_path, 4, label_smoothing_factor=0.1, **SPLIT)
    trainer.train()
    whole, right = trainer_for(
        head, tmp_path, 4, plug=False, label_smoothing_factor=0.1, max_steps=1, per_device_train_batch_size=4
    )
    whole.train()
    # BERT ignores the host's count, so one plain batch is right; GPT-2's smoother divides by a count of all labels
    factor = float(losses(trainer)[0] / losses(whole)[0])
    assert head == "gpt2-causal" or factor == pytest.approx(1.0, rel=2e-6, abs=LOGGED)
    scaled = {name: g * factor for name, g in right.gradients[0].items()}
    assert reference.difference(spy.gradients[0], scaled) <= 1e-6 + LOGGED


def test_a_micro_batch_without_any_label(tmp_path):
    batch = batch_for("bert-token", 4, uneven=True)
    batch["labels"][2] = -100
    trainer, spy = trainer_for("bert-token", tmp_path, 4, batch=batch, **SPLIT)
    trainer.train()
    right = reference.gradients(model_for("bert-token"), batch, lambda m, b: m(**b).loss)
    assert reference.difference(spy.gradients[0], right) <= 1e-6
    assert report(tmp_path)["window"]["skipped_updates"] == 0


def test_peft_adapters(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        # `lora_B` starts at zero; a start at random lets every adapter weight have a gradient
        config = peft.LoraConfig(
            task_type="TOKEN_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.0, init_lora_weights=False
        )
        return peft.get_peft_model(model_for("bert-token"), config)

    model = adapted()
    trainer, spy = trainer_for(
        "bert-token", tmp_path, 4, model=model, options={"ema": 0.5}, save_strategy="steps", save_steps=1, **SPLIT
    )
    trainer.train()
    right = reference.gradients(adapted(), batch_for("bert-token", 4, uneven=True), lambda m, b: m(**b).loss)
    assert reference.difference(spy.gradients[0], right) <= 1e-6
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").exists()
    again, _ = trainer_for(
        "bert-token", tmp_path, 4, model=adapted(), options={"ema": 0.5}, **{**SPLIT, "max_steps": 2}
    )
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


def test_a_loss_function_of_the_user_on_the_model(tmp_path):
    model = model_for("vit-image")
    model.loss_function = lambda labels, logits, config, **kwargs: (
        torch.nn.functional.cross_entropy(logits, labels) ** 2
    )
    trainer, _ = trainer_for(
        "vit-image", tmp_path, 4, model=model, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1
    )
    trainer.train()
    assert "hides how many terms" in report(tmp_path)["window"]["approximate_terms"][0]


def test_a_custom_loss_that_begins_with_nan_is_measured_on_the_next_window(tmp_path):
    calls = []

    def loss(outputs, labels, num_items_in_batch=None):
        calls.append(1)
        found = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return found * float("nan") if len(calls) <= 6 else found

    trainer, _ = trainer_for(
        "vit-image", tmp_path, 16, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        extra={"compute_loss_func": loss},
    )  # fmt: skip
    trainer.train()
    window = report(tmp_path)["window"]
    assert (window["exact"], window["approximate_terms"]) == (True, [])
    assert window["skipped_updates"] >= 1
    assert window["updates"] >= 1


def test_seq2seq_trainer_generates_and_reports_the_true_loss(tmp_path):
    batch = batch_for("t5-seq2seq", 6, uneven=True)
    arg = Seq2SeqTrainingArguments(
        **{
            k: v
            for k, v in arguments(tmp_path, **SPLIT).to_dict().items()
            if k
            in (
                "output_dir",
                "report_to",
                "learning_rate",
                "max_steps",
                "gradient_accumulation_steps",
                "per_device_train_batch_size",
                "optim",
                "remove_unused_columns",
                "disable_tqdm",
                "logging_steps",
                "save_strategy",
                "use_cpu",
                "train_sampling_strategy",
                "max_grad_norm",
            )
        },
        predict_with_generate=True,
        generation_max_length=6,
        per_device_eval_batch_size=4,
    )
    spy = Spy()
    trainer = Seq2SeqTrainer(
        model=model_for("t5-seq2seq"),
        args=arg,
        train_dataset=Rows({k: v[:4] for k, v in batch.items()}),
        eval_dataset=Rows(batch),
        callbacks=[AccelCallback, spy],
        compute_metrics=lambda p: {"rows": len(p.predictions)},
    )
    with torch.no_grad():
        right = float(model_for("t5-seq2seq").eval()(**batch).loss)
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(right, rel=2e-6)
    assert found["eval_rows"] == 6
    trainer.train()
    head = {k: v[:4] for k, v in batch.items()}
    gradients = reference.gradients(model_for("t5-seq2seq"), head, lambda m, b: m(**b).loss)
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6
