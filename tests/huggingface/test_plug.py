"""The plug on the trainer: how it is added, what it leaves behind, NaN, clipping, memory, contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

from integrations.huggingface import versions
from integrations.huggingface.checkpoint_folders import problems
from plugins import AccelError
from plugins.hf import AccelCallback
from tests import reference
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.runs import LOGGED, Spy, arguments, losses, report, trainer_for

SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
RUN_PATCHES = {
    "compute_loss",
    "training_step",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "prediction_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "save_model",
    "_save_checkpoint",
    "_run_epoch",
}


def right_gradients(head="bert-token", size=4):
    return reference.gradients(model_for(head), batch_for(head, size, uneven=True), lambda m, b: m(**b).loss)


def test_class_instance_and_added_later(tmp_path):
    for way in ("class", "instance", "add class", "add instance"):
        plugs = {"class": [AccelCallback], "instance": [AccelCallback()]}.get(way, [])
        spy = Spy()
        trainer = Trainer(
            model=model_for("bert-token"),
            args=arguments(tmp_path / way, **SPLIT),
            train_dataset=Rows(batch_for("bert-token", 4, uneven=True)),
            callbacks=[*plugs, spy],
        )
        if way.startswith("add"):
            trainer.callback_handler.callbacks.remove(spy)
            trainer.add_callback(AccelCallback if way == "add class" else AccelCallback())
            trainer.add_callback(spy)
        trainer.train()
        assert reference.difference(spy.gradients[0], right_gradients()) <= 1e-6, way
        assert report(tmp_path / way)["window"]["updates"] == 1


def test_class_is_the_public_name():
    import plugins

    assert plugins.AccelCallback is AccelCallback


def test_patches_are_undone_at_the_end_and_on_an_exception(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    trainer, _ = trainer_for("bert-token", tmp_path, 4, **SPLIT)
    entry = set(vars(trainer)) & {"train", "_inner_training_loop", "_get_dataloader", "evaluation_loop"}
    assert len(entry) == 4
    before, state = dict(vars(trainer.args)), set(vars(trainer.model))
    trainer.train()
    assert not RUN_PATCHES & set(vars(trainer))
    trainer.add_callback(Fails)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not RUN_PATCHES & set(vars(trainer))
    assert vars(trainer.args) == before
    assert set(vars(trainer.model)) - state <= {"_is_accelerate_prepared"}
    assert getattr(trainer, "loss_is_scaled_for_ga", None) is None
    assert (tmp_path / "accel_report.json").exists()


def test_removed_from_the_trainer_nothing_stays(tmp_path):
    trainer, spy = trainer_for("bert-token", tmp_path, 4, **SPLIT)
    trainer.remove_callback(AccelCallback)
    trainer.train()
    assert not {"train", "_inner_training_loop", "_get_dataloader", "evaluation_loop"} & set(vars(trainer))
    wrong = 1 if versions.SCALED.here else 0.1
    assert reference.difference(spy.gradients[0], right_gradients()) > wrong  # the host's own, times K
    assert not (tmp_path / "accel_report.json").exists()


def test_several_trainings(tmp_path):
    trainer, spy = trainer_for("bert-token", tmp_path, 4, options={"ema": 0.9}, **SPLIT)
    for _ in range(3):
        trainer.train()
        assert report(tmp_path)["window"]["updates"] == 1
    assert reference.difference(spy.gradients[0], right_gradients()) <= 1e-6
    assert len(spy.gradients) == 3


def test_model_init(tmp_path):
    spy = Spy()
    trainer = Trainer(
        model_init=lambda: model_for("bert-token"),
        args=arguments(tmp_path, **SPLIT),
        train_dataset=Rows(batch_for("bert-token", 4, uneven=True)),
        callbacks=[AccelCallback, spy],
    )
    trainer.train()
    trainer.train()
    for gradients in spy.gradients:
        assert reference.difference(gradients, right_gradients()) <= 1e-6


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


def test_where_no_batch_fits_the_host_s_own_words_are_said(tmp_path):
    class Never(Trainer):
        def training_step(self, *args, **kwargs):
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer, _ = trainer_for("bert-token", tmp_path, 4, kind=Never, max_steps=1, auto_find_batch_size=True,
                             per_device_train_batch_size=2)  # fmt: skip
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        trainer.train()


# -- settings against arguments --


@pytest.mark.parametrize(
    ("options", "more", "words"),
    [
        ({"accumulate": 4}, {"gradient_accumulation_steps": 2}, ["accumulate=4", "gradient_accumulation_steps=2"]),
        ({"effective_batch": 8}, {"gradient_accumulation_steps": 2}, ["effective_batch=8", "leave one of the two out"]),
        ({"effective_batch": 9}, {"per_device_train_batch_size": 4}, ["effective_batch=9", "8 or 12"]),
        ({"compile": "on"}, {"torch_compile": True}, ["compile=on", "torch_compile=True", "torch_compile=False"]),
        ({"precision": "fp16"}, {}, ["precision=fp16", "fp16=True"]),
        ({"precision": "fp32"}, {"bf16": True}, ["precision=fp32", "bf16=False"]),
        ({"acumulate": 4}, {}, ["acumulate=4", "did you mean accumulate?"]),
        ({"ema": 1.5}, {}, ["ema=1.5", "a decay between 0 and 1"]),
        ({"clip_norm": "much"}, {}, ["clip_norm=much", "a number above 0"]),
        ({"buckets": "wide"}, {}, ["buckets=wide"]),
        ({"accumulate": 2, "effective_batch": 8}, {}, ["accumulate=2", "effective_batch=8"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(options, more, words, tmp_path):
    with pytest.raises(AccelError) as error:
        trainer_for("bert-token", tmp_path, 4, options=options, **more)
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("options", [{"accumulate": 4}, {"effective_batch": 4}])
def test_accumulation_from_the_settings(options, tmp_path):
    trainer, spy = trainer_for(
        "bert-token", tmp_path, 4, options={**options, "lr_scale": "sqrt"}, max_steps=1, per_device_train_batch_size=1
    )
    trainer.train()
    assert reference.difference(spy.gradients[0], right_gradients()) <= 1e-6
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(0.1)  # 0.05 * sqrt(4)
    assert (trainer.args.gradient_accumulation_steps, trainer.args.learning_rate) == (1, 0.05)


def test_accumulation_cannot_come_after_the_host_planned_its_updates(tmp_path):
    trainer, _ = trainer_for("bert-token", tmp_path, 4, plug=False, max_steps=1, per_device_train_batch_size=1)
    trainer.add_callback(AccelCallback(accumulate=4))
    with pytest.raises(AccelError, match=r"accumulate=4: .*Trainer\(callbacks=\[...\]\)"):
        trainer.train()


def test_a_push_sees_the_finished_checkpoint(tmp_path):
    trainer, _ = trainer_for(
        "bert-token", tmp_path, 4, options={"ema": 0.5}, save_strategy="steps", save_steps=1, **SPLIT
    )
    pushed = []
    trainer.args.push_to_hub = True
    trainer._push_from_checkpoint = lambda folder: pushed.append((folder, problems(Path(folder))))
    trainer.train()
    assert pushed == [(str(tmp_path / "checkpoint-1"), [])]


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


def test_normalise_host_is_the_host(tmp_path):
    ours, spy = trainer_for("bert-token", tmp_path, 4, options={"normalise": "host"}, **SPLIT)
    ours.train()
    host, right = trainer_for("bert-token", tmp_path, 4, plug=False, **SPLIT)
    host.train()
    assert reference.difference(spy.gradients[0], right.gradients[0]) == 0
    assert losses(ours) == losses(host)


def test_one_micro_batch_an_update_is_the_host_bit_for_bit(tmp_path):
    runs = []
    for plug in (True, False):
        trainer, spy = trainer_for(
            "bert-sequence",
            tmp_path,
            16,
            plug=plug,
            per_device_train_batch_size=4,
            max_steps=4,
            optim="adamw_torch",
            max_grad_norm=0.5,
            train_sampling_strategy="random",
        )
        trainer.train()
        runs.append((spy.weights[-1], losses(trainer)))
    (ours, our_losses), (right, right_losses) = runs
    for name in right:
        torch.testing.assert_close(ours[name], right[name], rtol=1e-5, atol=1e-7)
    assert our_losses == pytest.approx(right_losses, rel=1e-6)


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


# -- BatchNorm --


@pytest.mark.parametrize("rule", ["host", "momentum", "precise", "freeze"])
def test_batchnorm_rules(rule, tmp_path):
    trainer, _ = trainer_for(
        "resnet-image",
        tmp_path,
        8,
        options={"batchnorm": rule},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    before = {n: t.clone() for n, t in trainer.model.named_buffers()}
    trainer.train()
    moved = {n: t for n, t in trainer.model.named_buffers() if n.endswith("running_mean")}
    name = next(iter(moved))
    layer = trainer.model.get_submodule(name.rsplit(".", 1)[0])
    assert layer.momentum == 0.1
    facts = report(tmp_path)["batchnorm"]
    assert (facts["rule"], facts["micro_batch_too_small"]) == (rule, rule != "freeze")
    if rule == "freeze":
        assert torch.equal(moved[name], before[name])
        return
    # the embedder's first layer sees the same convolution of the same pixels before and after one small update
    fresh = model_for("resnet-image")
    seen = {}
    first = fresh.get_submodule(name.rsplit(".", 1)[0])
    first.register_forward_hook(lambda m, i, o: seen.setdefault("means", []).append(i[0].detach().mean((0, 2, 3))))
    batch = batch_for("resnet-image", 8)
    with torch.no_grad():
        for at in range(0, 8, 2):
            fresh(pixel_values=batch["pixel_values"][at : at + 2])
    mean = torch.stack(seen["means"]).mean(0)
    if rule == "precise":
        torch.testing.assert_close(moved[name], mean, rtol=0.2, atol=0.02)
    else:
        kept = (0.9**4) if rule == "host" else 0.9
        drift = moved[name] / mean
        assert float(drift.median()) == pytest.approx(1 - kept, rel=0.25)
