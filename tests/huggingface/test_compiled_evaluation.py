"""What a compiled model is outside training: validated, generating, saved and loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from plugins.hf import AccelCallback
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.runs import ON, arguments, report, trainer_for

pytestmark = pytest.mark.usefixtures("fresh")


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
