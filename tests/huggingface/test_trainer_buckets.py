"""Buckets in the trainer's own loaders: few lengths, every sample once, predictions in the data's order."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

from plugins.hf import AccelCallback
from tests.huggingface.heads import model_for
from tests.huggingface.runs import LOGGED, report, trainer_for
from tests.huggingface.text import TokenRows, pad


def rows(number, longest=60, labels="sequence", seed=0):
    rng = random.Random(seed)
    found = []
    for _ in range(number):
        length = rng.randint(2, longest)
        ids = [rng.randint(3, 39) for _ in range(length)]
        found.append({"input_ids": ids, "labels": ids[0] % 3 if labels == "sequence" else [i % 3 for i in ids]})
    return found


def spied(trainer):
    """The shapes of training micro-batches and the samples in them."""
    shapes, samples = Counter(), Counter()
    step = trainer.training_step

    def seen(model, inputs, *args, **kwargs):
        shapes[tuple(inputs["input_ids"].shape)] += 1
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            samples[tuple(ids[mask.bool()].tolist())] += 1
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = seen
    return shapes, samples


def start(folder, data, head="bert-sequence", options=None, **more):
    extra = {"data_collator": pad, **more.pop("extra", {})}
    return trainer_for(
        head,
        folder,
        0,
        batch=data if isinstance(data, torch.utils.data.Dataset) else TokenRows(data),
        options=options,
        extra=extra,
        **{"per_device_train_batch_size": 8, "train_sampling_strategy": "random", "num_train_epochs": 1, **more},
    )


def test_few_lengths_every_sample_once_and_the_same_number_of_updates(tmp_path):
    data = rows(203)
    trainer, _ = start(tmp_path, data, options={"buckets": [16, 32, 48, 64]}, gradient_accumulation_steps=2)
    shapes, samples = spied(trainer)
    trainer.train()
    assert samples == Counter(tuple(row["input_ids"]) for row in data)
    assert {length for _, length in shapes} <= {16, 32, 48, 64}
    assert [shape for shape in shapes if shape[0] != 8] == [(3, 64)]
    assert trainer.state.global_step == 13  # ceil(ceil(203 / 8) / 2), as without buckets
    found = report(tmp_path)["shapes"]
    assert found["buckets"] == [16, 32, 48, 64]
    assert len(found["seen"]) == len(shapes)
    assert 0 < found["padding_fraction"] < 0.35


def test_auto_finds_edges_that_save_padding_and_leaves_equal_lengths_alone(tmp_path):
    data = rows(203)
    fractions = {}
    for buckets in ("off", "auto"):
        trainer, _ = start(tmp_path / buckets, data, options={"buckets": buckets})
        shapes, _ = spied(trainer)
        trainer.train()
        fractions[buckets] = report(tmp_path / buckets)["shapes"]["padding_fraction"]
    assert len({length for _, length in shapes}) <= 8
    assert fractions["auto"] < 0.5 * fractions["off"]
    equal = [{"input_ids": [5] * 12, "labels": 1} for _ in range(20)]
    trainer, _ = start(tmp_path, equal)
    trainer.train()
    assert report(tmp_path)["shapes"]["buckets"] == []


def test_the_loss_is_that_of_the_unpadded_samples(tmp_path):
    data = rows(40, labels="token")
    trainer, _ = start(tmp_path, data, head="bert-token", options={"buckets": [64]}, per_device_train_batch_size=40)
    trainer.train()
    model, total, count = model_for("bert-token").eval(), 0.0, 0
    with torch.no_grad():
        for row in data:
            batch = {k: torch.tensor([v]) for k, v in row.items()}
            total += float(model(**batch).loss) * len(row["input_ids"])
            count += len(row["input_ids"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, rel=1e-6, abs=LOGGED)


def test_evaluation_and_prediction_come_back_in_the_data_s_order(tmp_path):
    data = rows(37)
    seen = {}

    def metrics(prediction):
        seen["labels"] = prediction.label_ids
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer, _ = start(
        tmp_path,
        data,
        options={"buckets": [16, 32, 64]},
        extra={"compute_metrics": metrics},
        per_device_eval_batch_size=4,
    )
    lengths = set()
    step = trainer.prediction_step

    def spied_step(model, inputs, *args, **kwargs):
        lengths.add(inputs["input_ids"].shape[1])
        return step(model, inputs, *args, **kwargs)

    trainer.prediction_step = spied_step
    trainer.evaluate()
    assert seen["labels"].tolist() == [row["labels"] for row in data]
    assert lengths == {16, 32, 64}
    predicted = trainer.predict(TokenRows(data))
    assert predicted.label_ids.tolist() == [row["labels"] for row in data]
    model = trainer.model.eval()
    with torch.no_grad():
        one_by_one = torch.cat([model(input_ids=torch.tensor([row["input_ids"]])).logits for row in data])
    np.testing.assert_allclose(predicted.predictions, one_by_one.numpy(), rtol=1e-4, atol=1e-5)


def test_resume_inside_an_epoch_sees_the_rest_of_it(tmp_path):
    data = rows(64)
    run = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "optim": "adamw_torch"}
    straight, spy = start(tmp_path / "straight", data, options={"buckets": [16, 32, 64]}, **run)
    straight.train()
    for step in (3, 12):
        again, spied_again = start(tmp_path / str(step), data, options={"buckets": [16, 32, 64]}, **run)
        again.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        for ours, right in zip(spied_again.weights, spy.weights[step:], strict=True):
            assert all(torch.equal(ours[name], right[name]) for name in right)


def test_a_sample_longer_than_the_edges(tmp_path):
    trainer, _ = start(tmp_path, rows(30, longest=60), options={"buckets": [16, 32]})
    shapes, samples = spied(trainer)
    trainer.train()
    assert sum(samples.values()) == 30
    assert len({length for _, length in shapes}) <= 3
    assert any("buckets=[16, 32]: the longest sample has" in line for line in report(tmp_path)["warnings"])


def test_a_strategy_of_the_user_stays(tmp_path):
    trainer, _ = start(tmp_path, rows(30), options={"buckets": [64]}, train_sampling_strategy="group_by_length")
    trainer.train()
    found = report(tmp_path)
    assert found["shapes"]["buckets"] == []
    assert any("train_sampling_strategy" in line and "buckets" in line for line in found["warnings"])


def test_hf_datasets_with_a_tokenizer_s_collators(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(40)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t1")), pad_token="t0", unk_token="t1"
    )
    for head, labels, collator in (
        ("bert-sequence", "sequence", DataCollatorWithPadding),
        ("bert-token", "token", DataCollatorForTokenClassification),
    ):
        data = Dataset.from_list(
            [{**row, "attention_mask": [1] * len(row["input_ids"]), "text": "x"} for row in rows(50, labels=labels)]
        )
        trainer, _ = start(
            tmp_path / head,
            data,
            head=head,
            options={"buckets": [32, 64]},
            remove_unused_columns=True,
            extra={"data_collator": collator(tokenizer), "processing_class": tokenizer},
        )
        shapes, samples = spied(trainer)
        trainer.train()
        assert sum(samples.values()) == 50
        assert {length for _, length in shapes} == {32, 64}
        assert trainer.evaluate()["eval_loss"] > 0


def test_iterable_data_through_a_bounded_buffer(tmp_path):
    data = rows(203)
    stream = IterableDataset.from_generator(lambda: iter(data))
    for name, options in (("given", {"buckets": [16, 32, 64]}), ("auto", {})):
        trainer, _ = start(tmp_path / name, data, options=options, max_steps=26, extra={"eval_dataset": stream})
        trainer.train_dataset = stream
        shapes, samples = spied(trainer)
        trainer.train()
        assert sum(samples.values()) == 203
        assert len({length for _, length in shapes}) <= 8
        assert len([shape for shape in shapes if shape[0] != 8]) == 1
        assert trainer.evaluate()["eval_loss"] > 0
        assert report(tmp_path / name)["shapes"]["buckets"]


def test_callback_added_after_the_trainer_was_built(tmp_path):
    data = rows(203)
    trainer, _ = start(tmp_path, data)
    plug = trainer.pop_callback(AccelCallback)
    plug.detach()
    trainer.add_callback(AccelCallback(buckets=[16, 32, 64]))
    shapes, samples = spied(trainer)
    trainer.train()
    assert samples == Counter(tuple(row["input_ids"]) for row in data)
    assert {length for _, length in shapes} <= {16, 32, 64}
    assert report(tmp_path)["shapes"]["buckets"] == [16, 32, 64]


def test_loader_workers(tmp_path):
    data = rows(40)
    trainer, _ = start(tmp_path, data, options={"buckets": [32, 64]}, dataloader_num_workers=2)
    shapes, samples = spied(trainer)
    trainer.train()
    assert samples == Counter(tuple(row["input_ids"]) for row in data)
    assert {length for _, length in shapes} == {32, 64}
