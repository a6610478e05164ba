"""The plug on the trainer: how it is added, what it leaves behind, contradictions, BatchNorm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

from integrations.huggingface import versions
from integrations.huggingface.checkpoint_folders import problems
from plugins import AccelError
from plugins.hf import AccelCallback
from tests import reference
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.plugged import RUN_PATCHES, SPLIT, right_gradients
from tests.huggingface.runs import Spy, arguments, losses, report, trainer_for


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
