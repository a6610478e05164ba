"""Buckets never do what the host alone would not survive: what stays unpadded, and what is left to the host."""

from __future__ import annotations

import random

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BatchEncoding,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaModel,
)

from integrations.huggingface.bucketing import find_edges, with_overflow
from integrations.huggingface.collator import BucketCollator
from integrations.huggingface.lengths import room, survey_dataset
from plugins.errors import AccelError
from tests.huggingface.runs import losses, report, trainer_for
from tests.huggingface.text import TokenRows

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}


def bert(kind=BertForSequenceClassification, **more):
    torch.manual_seed(0)
    return kind(BertConfig(**{**SIZES, "max_position_embeddings": 64, **more}))


def rows(number=24, longest=40, seed=0, **values):
    """Samples of unequal length; `values` give further entries from (index, length)."""
    rng = random.Random(seed)
    found = []
    for index in range(number):
        n = longest if index == 0 else rng.randint(2, longest)
        ids = [rng.randint(3, 39) for _ in range(n)]
        found.append({"input_ids": ids, "attention_mask": [1] * n, **{k: f(index, n) for k, f in values.items()}})
    return found


def pad(samples, along=("input_ids", "attention_mask"), fill=()):
    """Pads the named entries to the longest sample and stacks the rest."""
    width = max(len(s["input_ids"]) for s in samples)
    fill = dict(fill)
    return {
        name: torch.tensor(
            [s[name] + [fill.get(name, 0)] * (width - len(s[name])) if name in along else s[name] for s in samples]
        )
        for name in samples[0]
    }


def run(folder, model, data, *, plug=True, options=None, extra=None, **more):
    settings = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 4, **more}
    data = data if isinstance(data, (torch.utils.data.Dataset, datasets.Dataset)) else TokenRows(data)
    trainer, _ = trainer_for(
        "bert-sequence",
        folder,
        0,
        model=model,
        batch=TokenRows([]),
        options=options,
        plug=plug,
        extra={"data_collator": pad, "eval_dataset": data, **(extra or {})},
        **settings,
    )
    trainer.train_dataset = data
    return trainer


# -- what is padded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "labels", "width"),
    [
        ("multi_label_classification", lambda i, n: [1.0, 0.0, 0.0, 1.0, 1.0], 5),
        ("regression", lambda i, n: [0.5], 1),
        ("regression", lambda i, n: [float(i), 0.0, 1.0], 3),
    ],
)
def test_targets_that_are_not_along_the_input_stay_as_they_are(tmp_path, problem, labels, width):
    data = rows(labels=labels)
    trainer = run(tmp_path, bert(num_labels=width, problem_type=problem), data)
    trainer.train()
    assert report(tmp_path)["shapes"]["buckets"]
    host = run(tmp_path, trainer.model, data, plug=False)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(host.evaluate()["eval_loss"], rel=1e-5)


def test_integer_targets_of_constant_length_stay_also_where_a_batch_has_that_length():
    data = [{"input_ids": [5] * n, "labels": [0, 1, 0, 1, 1]} for n in (5, 5, 9)]
    batch = BucketCollator(pad, [8, 16], forms=survey_dataset(data, "input_ids").forms)(data[:2])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["labels"].shape == (2, 5)


def test_tensors_that_only_happen_to_have_the_input_s_length():
    data = [{"input_ids": [5] * n, "features": [0.5] * 7, "pixels": torch.zeros(3, 4, 4).tolist()} for n in (7, 3, 9)]
    forms = survey_dataset(data, "input_ids").forms
    for sample in data:
        batch = BucketCollator(pad, [8, 16], forms=forms)([sample])
        assert batch["input_ids"].shape[1] in (8, 16)
        assert batch["features"].shape == (1, 7)
        assert batch["pixels"].shape == (1, 3, 4, 4)


def test_a_tensor_that_may_go_along_the_input_leaves_the_batch_to_the_host(caplog):
    def permuted(samples):
        batch = pad(samples)
        length = batch["input_ids"].shape[1]
        return {**batch, "perm_mask": torch.zeros(len(samples), length, length)}

    collate = BucketCollator(permuted, [16])
    for _ in range(2):
        batch = collate([{"input_ids": [5] * 9}])
        assert batch["input_ids"].shape == (1, 9)
        assert batch["perm_mask"].shape == (1, 9, 9)
    assert len(caplog.records) == 1
    assert "perm_mask" in caplog.text
    square = BucketCollator(lambda s: {**pad(s), "attention_mask": torch.ones(1, 9, 9)}, [16])([{"input_ids": [5] * 9}])
    assert square["input_ids"].shape == (1, 9)


def test_labels_that_the_collator_makes_from_the_input_are_padded():
    def causal(samples):
        batch = pad(samples)
        return {**batch, "labels": batch["input_ids"].clone()}

    batch = BucketCollator(causal, [8])([{"input_ids": [5, 6, 7]}])
    assert batch["labels"].tolist() == [[5, 6, 7, *[-100] * 5]]


def test_label_names_are_padded_as_labels():
    data = [{"input_ids": [5] * n, "tags": [1] * n} for n in (3, 5)]
    collate = BucketCollator(
        lambda s: pad(s, along=("input_ids", "tags"), fill={"tags": -100}),
        [8],
        forms=survey_dataset(data, "input_ids", ["tags"]).forms,
        label_names=["tags"],
    )
    assert collate(data)["tags"].tolist() == [[1] * 3 + [-100] * 5, [1] * 5 + [-100] * 3]


def test_a_collator_sees_the_samples_as_they_are(tmp_path):
    def attributes(samples):
        return pad(
            [{"input_ids": s.input_ids, "attention_mask": s.attention_mask, "labels": s["labels"]} for s in samples]
        )

    data = [BatchEncoding(row) for row in rows(labels=lambda i, n: i % 2)]
    trainer = run(tmp_path, bert(), data, extra={"data_collator": attributes})
    trainer.train()
    assert report(tmp_path)["shapes"]["buckets"]
    assert len(losses(trainer)) == 4


def test_an_answer_behind_the_input_stays_ignored():
    data = rows(4, start_positions=lambda i, n: n, end_positions=lambda i, n: n)
    batch = BucketCollator(pad, [48])(data[:1])
    assert batch["input_ids"].shape == (1, 48)
    assert batch["start_positions"].tolist() == batch["end_positions"].tolist() == [48]
    model = bert(BertForQuestionAnswering).eval()
    answered = {**data[0], "start_positions": 1, "end_positions": 2}
    both, alone = (model(**BucketCollator(pad, [48])(batch)).loss for batch in ([answered, data[0]], [answered]))
    torch.testing.assert_close(both, alone)


# -- how far it is padded ------------------------------------------------------------------------------------------


def test_edges_end_where_the_model_s_positions_do(tmp_path):
    data = rows(longest=50, labels=lambda i, n: i % 2)
    trainer = run(tmp_path, bert(max_position_embeddings=50), data)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.train()
    assert report(tmp_path)["shapes"]["buckets"][-1] == 50
    assert find_edges([3, 50], 2, room=50)[-1] == with_overflow([8], 50, 50)[-1] == 50
    assert find_edges([3, 50], 2, room=64)[-1] == 56
    assert room(RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=66)), None) == 64
    assert room(nn.Linear(2, 2), None) == 0


def test_label_edges_end_where_the_model_s_positions_do(tmp_path):
    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=45,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    data = rows(labels=lambda i, n: [7] * (45 if i == 1 else 2 + i))

    def both(samples):
        batch = pad([{k: v for k, v in s.items() if k != "labels"} for s in samples])
        widest = max(len(s["labels"]) for s in samples)
        batch["labels"] = torch.tensor([s["labels"] + [-100] * (widest - len(s["labels"])) for s in samples])
        return batch

    trainer = run(tmp_path, BartForConditionalGeneration(config), data, extra={"data_collator": both}, max_steps=12)
    trainer.train()
    assert report(tmp_path)["shapes"]["buckets"]
    assert trainer.evaluate()["eval_loss"] > 0


def test_edges_beyond_the_model_s_positions_are_refused(tmp_path):
    with pytest.raises((AccelError, ValueError), match=r"buckets=\[10000\]: BertForSequenceClassification has 64 pos"):
        run(tmp_path, bert(), rows(labels=lambda i, n: 0), options={"buckets": [10000]})


def test_a_collator_that_cuts_is_not_padded_again():
    batch = BucketCollator(lambda s: {"input_ids": torch.tensor([s[0]["input_ids"][:5]])}, [16])(
        [{"input_ids": [5] * 9}]
    )
    assert batch["input_ids"].shape == (1, 5)


# -- what is left to the host --------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["batch_eval_metrics", "eval_do_concat_batches", "dataloader_drop_last"])
def test_evaluation_that_cannot_be_put_back_in_order_is_the_host_s(tmp_path, setting):
    data = rows(23, labels=lambda i, n: i % 2)
    more = {setting: setting != "eval_do_concat_batches", "per_device_eval_batch_size": 5}
    ours, theirs = (run(tmp_path, bert(), data, plug=plug, **more).predict(TokenRows(data)) for plug in (True, False))
    np.testing.assert_array_equal(np.concatenate(ours.label_ids, None), np.concatenate(theirs.label_ids, None))
    if setting == "dataloader_drop_last":
        assert ours.label_ids.tolist() == [row["labels"] for row in data[:20]]


def test_loaders_and_streams_of_evaluation_give_the_data_in_its_own_order(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from data

    data = rows(labels=lambda i, n: i % 2)
    right = [row["labels"] for row in data]
    trainer = run(tmp_path, bert(), data)
    for loader in (trainer.get_eval_dataloader(), trainer.get_test_dataloader(TokenRows(data))):
        assert [label for batch in loader for label in batch["labels"].tolist()] == right
    assert trainer.predict(Stream()).label_ids.tolist() == right
    assert trainer.predict(TokenRows(data)).label_ids.tolist() == right


def test_a_model_without_an_attention_mask_is_the_host_s(tmp_path):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 2)

        def forward(self, input_ids, labels=None):
            logits = self.head(self.embed(input_ids).mean(1))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{k: row[k] for k in ("input_ids", "labels")} for row in rows(labels=lambda i, n: i % 2)]
    both = []
    for plug in (True, False):
        trainer = run(tmp_path, Mean(), data, plug=plug)
        trainer.train()
        both.append(losses(trainer))
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    assert any("Mean takes no attention_mask" in line for line in report(tmp_path)["warnings"])


@pytest.mark.parametrize("length", [lambda n: 5 * n, lambda n: "long"])
def test_a_column_named_length_is_not_believed(tmp_path, length):
    data = datasets.Dataset.from_list(rows(labels=lambda i, n: i % 2, length=lambda i, n: length(n)))
    trainer = run(tmp_path, bert(), data, remove_unused_columns=True)
    trainer.train()
    assert 0 < report(tmp_path)["shapes"]["buckets"][-1] <= 40


class Torn(TokenRows):
    """One sample cannot be read."""

    bad = -1

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("unreadable")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_leaves_the_order_to_the_host(tmp_path):
    data = Torn(rows(labels=lambda i, n: i % 2))
    both = []
    for plug in (True, False):
        data.bad = 17
        trainer = run(tmp_path, bert(), data, plug=plug, max_steps=1)
        trainer.train()
        both.append(losses(trainer))
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    assert any("sample 17 cannot be read (OSError)" in line for line in report(tmp_path)["warnings"])
