"""Compile in place under the Trainer: one graph, none of validation's or generation's, the host's own keys."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from integrations.huggingface.adapter import Adapter
from plugins.core.autotune import tuner
from plugins.hf import AccelCallback
from tests import reference
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.runs import LOGGED, arguments, losses, report, trainer_for
from tests.huggingface.text import TokenRows, pad

ON = {"compile": "on", "compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


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


def test_case_25205_checkpoint_loads_clean(tmp_path):
    trainer, _ = trainer_for(
        "bert-sequence",
        tmp_path,
        8,
        options={**ON, "ema": 0.5},
        per_device_train_batch_size=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-2", "checkpoint-4", "final"):
        model, info = type(trainer.model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info[key] for key in info if key.endswith(("_keys", "_msgs"))), info
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("scope", ["whole", "regional"])
def test_generation_is_eager_and_adds_no_graph(scope, tmp_path):
    batch = batch_for("t5-seq2seq", 8)
    given = arguments(tmp_path, max_steps=2, per_device_train_batch_size=4, learning_rate=0.0).to_dict()
    names = (
        "output_dir",
        "report_to",
        "learning_rate",
        "max_steps",
        "per_device_train_batch_size",
        "optim",
        "use_cpu",
        "remove_unused_columns",
        "disable_tqdm",
        "save_strategy",
        "train_sampling_strategy",
    )
    arg = Seq2SeqTrainingArguments(
        **{name: given[name] for name in names},
        predict_with_generate=True,
        eval_strategy="steps",
        eval_steps=1,
        generation_config=GenerationConfig(max_new_tokens=5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1),
    )
    tokens = []
    for callbacks in ([], [AccelCallback(**ON, compile_scope=scope)]):
        trainer = Seq2SeqTrainer(
            model=model_for("t5-seq2seq"),
            args=arg,
            train_dataset=Rows(batch),
            eval_dataset=Rows(batch),
            callbacks=callbacks,
            compute_metrics=lambda p: (tokens.append(p.predictions.tolist()), {})[1],
        )
        trainer.train()
    facts = report(tmp_path)["compile"]
    assert facts["decision"] == scope
    assert set(facts["phases"]) == {"train"}
    assert len(tokens) == 4
    assert tokens[2:] == tokens[:2]


def test_validate_compiled(tmp_path):
    trainer, _ = trainer_for(
        "bert-sequence",
        tmp_path,
        8,
        options={**ON, "validate": "compiled"},
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    assert set(report(tmp_path)["compile"]["phases"]) == {"train", "validation"}


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
    adapter = Adapter.__new__(Adapter)
    trainer = SimpleNamespace(model_wrapped=model)
    adapter._trainer, adapter.on_model = lambda: trainer, []
    adapter._zero_as(type("Run", (), {"keeps_gradients": property(lambda run: keeps[0])})())
    for keep in (False, True, False):
        keeps[0] = keep
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        assert [p.grad is not None and not p.grad.any() for p in model.parameters()] == [keep, keep]
    for held in adapter.on_model:
        held.undo()
    assert "zero_grad" not in vars(model)
