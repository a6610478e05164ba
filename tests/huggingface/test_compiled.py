"""Compile in place under the Trainer: one graph, none of validation's or generation's, the host's own keys."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from plugins.core.autotune import tuner
from tests import reference
from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.runs import LOGGED, ON, losses, report, trainer_for
from tests.huggingface.text import TokenRows, pad

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize(
    ("head", "scope"),
    [
        ("bert-sequence", "whole"),
        ("gpt2-causal", "whole"),
        ("t5-seq2seq", "whole"),
        ("bert-token", "regional"),
        ("llama-causal", "regional"),
        ("vit-image", "regional"),
        ("t5-seq2seq", "regional"),
    ],
)
def test_gradients_compiled(head, scope, tmp_path):
    trainer, spy = trainer_for(
        head,
        tmp_path,
        4,
        options={**ON, "compile_scope": scope},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
    )
    trainer.train()
    right = reference.gradients(model_for(head), batch_for(head, 4, uneven=True), lambda m, b: m(**b).loss)
    # Parameters of an output that the loss does not use get a gradient of zero under compile, None without
    extra = spy.gradients[0].keys() - right.keys()
    assert all(not spy.gradients[0][name].any() for name in extra)
    assert reference.difference({n: spy.gradients[0][n] for n in right}, right) <= 1e-5
    facts = report(tmp_path)["compile"]
    assert facts["decision"] == scope, facts["reason"]
    assert facts["graphs"] >= 1
    assert "_compiled_call_impl" not in vars(trainer.model)


def test_case_problem_type(tmp_path):
    model = model_for("bert-sequence")
    assert model.config.problem_type is None
    trainer, _ = trainer_for(
        "bert-sequence",
        tmp_path,
        12,
        model=model,
        options=ON,
        per_device_train_batch_size=4,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    facts = report(tmp_path)["compile"]
    assert (facts["graphs"], facts["recompiles"]) == (1, 0)


def test_case_pytorch_188150(tmp_path):
    rng = random.Random(0)
    model = model_for("bert-sequence")
    model.bert.embeddings.position_embeddings = torch.nn.Embedding(512, 16)
    model.bert.embeddings.register_buffer("position_ids", torch.arange(512)[None], persistent=False)
    model.bert.embeddings.register_buffer("token_type_ids", torch.zeros(1, 512, dtype=torch.long), persistent=False)
    lengths = [rng.randint(1, 512) for _ in range(200)]
    rows = [{"input_ids": [rng.randint(3, 39) for _ in range(n)], "labels": n % 3} for n in lengths]
    trainer, _ = trainer_for(
        "bert-sequence",
        tmp_path,
        0,
        batch=TokenRows(rows),
        model=model,
        options={**ON, "buckets": [64, 128, 256, 512]},
        per_device_train_batch_size=8,
        num_train_epochs=1,
        train_sampling_strategy="random",
        extra={"data_collator": pad},
        learning_rate=0.0,
    )
    trainer.train()
    found = report(tmp_path)
    assert {tuple(shape) for shape in found["shapes"]["seen"]} == {(8, 64), (8, 128), (8, 256), (8, 512)}
    assert found["window"]["micro_batches"] == 25
    assert found["compile"]["decision"] == "whole"
    assert found["compile"]["graphs"] <= found["compile"]["budget"]
    with torch.no_grad():
        plain = [
            float(model.eval()(input_ids=torch.tensor([r["input_ids"]]), labels=torch.tensor([r["labels"]])).loss)
            for r in rows
        ]
    assert sum(losses(trainer)) / 25 == pytest.approx(sum(plain) / 200, rel=2e-6, abs=LOGGED)


@pytest.mark.parametrize("head", ["bert-sequence", "llama-causal"])
def test_five_lengths_are_one_graph(head, tmp_path):
    rows = []
    for length in (5, 9, 14, 20, 27):
        ids = [3 + i % 30 for i in range(length)]
        rows += [{"input_ids": ids, "labels": ids if head.endswith("causal") else 1}] * 4
    trainer, _ = trainer_for(
        head,
        tmp_path,
        0,
        batch=TokenRows(rows),
        options={**ON, "buckets": "off"},
        per_device_train_batch_size=4,
        num_train_epochs=1,
        extra={"data_collator": pad},
    )
    trainer.train()
    found = report(tmp_path)
    assert len(found["shapes"]["seen"]) == 5
    assert found["compile"]["graphs"] <= 2, found["compile"]["recompile_reasons"]
    assert found["compile"]["decision"] == "whole"


def test_a_micro_batch_of_one_survives(tmp_path):
    trainer, spy = trainer_for(
        "bert-token", tmp_path, 5, options=ON, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1
    )
    trainer.train()
    right = reference.gradients(
        model_for("bert-token"), batch_for("bert-token", 5, uneven=True), lambda m, b: m(**b).loss
    )
    assert reference.difference({n: spy.gradients[0][n] for n in right}, right) <= 1e-5


def test_gradient_checkpointing_lora_and_frozen_parts(tmp_path):
    peft = pytest.importorskip("peft")
    batch = batch_for("bert-token", 4, uneven=True)

    def frozen():
        model = model_for("bert-token")
        model.bert.embeddings.requires_grad_(False)
        return model

    def adapted():
        torch.manual_seed(1)
        config = peft.LoraConfig(
            task_type="TOKEN_CLS", r=2, target_modules=["query"], lora_dropout=0.0, init_lora_weights=False
        )
        return peft.get_peft_model(model_for("bert-token"), config)

    for make, more in (
        (
            lambda: model_for("bert-token"),
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        ),
        (frozen, {}),
        (adapted, {}),
    ):
        torch._dynamo.reset()
        trainer, spy = trainer_for(
            "bert-token",
            tmp_path,
            4,
            model=make(),
            options=ON,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=1,
            **more,
        )
        trainer.train()
        right = reference.gradients(make(), batch, lambda m, b: m(**b).loss)
        assert reference.difference({n: spy.gradients[0][n] for n in right}, right) <= 1e-5
        facts = report(tmp_path)["compile"]
        assert facts["decision"] == "whole" or facts["reason"] != "compile=on", facts


@pytest.mark.parametrize("given", ["torch_compile=True", "ACCELERATE_DYNAMO_BACKEND=eager"])
def test_torch_compile_of_the_host_is_left_to_it(given, tmp_path, monkeypatch):
    asked = {"torch_compile": True, "torch_compile_backend": "eager"}
    if given.startswith("ACCELERATE"):  # of `accelerate launch --dynamo_backend`
        monkeypatch.setenv(*given.split("="))
        asked = {}
    trainer, _ = trainer_for("bert-token", tmp_path, 4, per_device_train_batch_size=4, max_steps=1, **asked)
    trainer.train()
    found = report(tmp_path)
    assert found["compile"]["decision"] == "eager"
    assert any(line.startswith(given) for line in found["warnings"])


def test_case_pytorch_98102_a_short_run_stays_eager_and_says_how_many_updates_pay(tmp_path, monkeypatch):
    """At 0.1 s a micro-batch, two an update. The guess of a compile: 6 s, and 0.6 s a leaf of one block."""
    monkeypatch.setattr(tuner.Tuner, "step_seconds", 0.1)
    trainer, _ = trainer_for(
        "bert-token",
        tmp_path,
        8,
        options={"plan": "auto", "cache_dir": str(tmp_path / "cache")},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=20,
    )
    block = trainer.model.bert.encoder.layer[0]
    seconds = 6 + 0.6 * sum(not list(module.children()) for module in block.modules())
    updates = 10 * seconds / 0.2  # a compile may cost a tenth of the time that is left
    trainer.train()
    facts = report(tmp_path)["compile"]
    assert (facts["decision"], facts["graphs"]) == ("eager", 0)
    assert facts["reason"] == (
        f"a compile of about {seconds:.0f} s pays in a run of about {updates:.0f} updates or more; 18 are left"
    )


@pytest.mark.slow
def test_regional_compiles_in_a_third_of_the_time(tmp_path, monkeypatch):
    from transformers import BertConfig, BertForSequenceClassification

    seconds = {}
    for scope in ("whole", "regional"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / scope))
        monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=40,
                hidden_size=64,
                num_hidden_layers=6,
                num_attention_heads=4,
                intermediate_size=128,
                num_labels=3,
            )
        )
        trainer, _ = trainer_for(
            "bert-sequence",
            tmp_path / scope,
            8,
            model=model,
            options={"compile": "on", "compile_scope": scope, "dynamic": "static"},
            per_device_train_batch_size=4,
            max_steps=2,
        )
        trainer.train()
        facts = report(tmp_path / scope)["compile"]
        assert facts["decision"] == scope, facts["reason"]
        seconds[scope] = facts["seconds"]
    print(f"cold compile of a 6-layer BERT: {seconds}")
    assert Path(tmp_path / "regional").exists()
    assert seconds["regional"] < seconds["whole"]
