"""A user's datasets, streams and collators are run as often as the host alone would run them."""

from __future__ import annotations

import itertools
import os
import random
import time
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import BertForQuestionAnswering, BertForTokenClassification, Trainer

from integrations.huggingface import forked_process
from integrations.huggingface.collator import BucketCollator
from integrations.huggingface.forked_process import ForkFailed, in_a_copy
from tests.huggingface.runs import losses, report
from tests.huggingface.test_bucket_limits import bert, pad, rows, run
from tests.huggingface.text import TokenRows

LABELS = {"labels": lambda i, n: i % 2}
AS_HOST = "batches stay as the host makes them"


def both(folder, make, **more):
    """The same run with the plug and by the host alone: `make()` gives data, what is compared, and a collator."""
    found = []
    for plug in (True, False):
        data, compared, *collator = make()
        extra = {"data_collator": collator[0]} if collator else {}
        trainer = run(folder / str(plug), bert(), data, plug=plug, extra=extra, **more)
        trainer.train()
        found.append((compared(), losses(trainer)))
    return found


# -- streams -------------------------------------------------------------------------------------------------------


class GoesOn(IterableDataset):
    """A stream that goes on where it was left; counts how often it is begun."""

    def __init__(self, number):
        self.left, self.begun, self.taken = iter(rows(number, **LABELS)), 0, 0

    def __iter__(self):
        self.begun += 1
        for sample in self.left:
            self.taken += 1
            yield sample


@pytest.mark.parametrize("number", [400, 9])
def test_a_stream_that_goes_on_where_it_was_left_is_read_as_the_host_reads_it(tmp_path, number):
    def make():
        stream = GoesOn(number)
        return stream, lambda: (stream.begun, stream.taken)

    ours, theirs = both(tmp_path, make)
    assert ours == theirs
    assert ours[0][0] == 1


def test_a_stream_fed_by_the_training_itself_does_not_wait_for_ever(tmp_path):
    class Fed(IterableDataset):
        def __iter__(self):
            for number, sample in enumerate(itertools.cycle(rows(**LABELS))):
                assert number < 2 * (trainer.state.global_step + 3), "read further ahead than the host reads"
                yield sample

    trainer = run(tmp_path, bert(), Fed())
    trainer.train()
    assert len(losses(trainer)) == 4


@pytest.mark.parametrize("options", [{}, {"buckets": [16, 48]}])
def test_a_generator_of_datasets_is_begun_once_and_gives_no_sample_that_the_run_cannot_use(tmp_path, options):
    samples, begun, taken = iter(rows(100, **LABELS)), [], []

    def generate():
        begun.append(0)
        for sample in samples:
            taken.append(0)
            yield sample

    data = datasets.IterableDataset.from_generator(generate)
    begun.clear()
    taken.clear()
    trainer = run(tmp_path, bert(), data, options=options)
    for run_number in (1, 2):
        trainer.train()
        assert len(begun) == run_number
        assert len(taken) <= run_number * (4 * 2 + 2)
    assert report(tmp_path)["shapes"]["buckets"]


def test_edges_that_are_given_hold_for_any_stream_and_what_was_read_first_is_trained_on(tmp_path):
    stream = GoesOn(20)
    trainer = run(tmp_path, bert(), stream, options={"buckets": [16, 48]}, max_steps=10)
    seen, step = [], trainer.training_step
    trainer.training_step = lambda model, inputs, *a: seen.append(inputs["input_ids"].shape) or step(model, inputs, *a)
    trainer.train()
    assert (stream.begun, stream.taken, len(seen)) == (1, 20, 10)
    assert {shape[1] for shape in seen} <= {16, 48}


# -- map-style data ------------------------------------------------------------------------------------------------


class Counts(TokenRows):
    """Counts its reads, and draws from a generator of its own for each."""

    def __init__(self, data):
        super().__init__(data)
        self.reads, self.draw = 0, np.random.default_rng(0)

    def __getitem__(self, index):
        self.reads += 1
        self.drawn = self.draw.random()
        return super().__getitem__(index)


def test_a_dataset_is_read_as_often_as_by_the_host(tmp_path):
    def make():
        data = Counts(rows(**LABELS))
        return data, lambda: (data.reads, data.drawn)

    ours, theirs = both(tmp_path, make, max_steps=-1, num_train_epochs=2)
    assert ours[0] == theirs[0] == (48, theirs[0][1])
    assert report(tmp_path / "True")["shapes"]["buckets"]


def test_samples_of_random_length_are_left_to_the_host(tmp_path):
    class Cut(TokenRows):
        def __getitem__(self, index):
            n = int(torch.randint(2, 40, ()))
            return {"input_ids": [5] * n, "attention_mask": [1] * n, "labels": index % 2}

    trainer = run(tmp_path, bert(), Cut([0] * 24))
    trainer.train()
    assert report(tmp_path)["shapes"]["buckets"] == []
    assert any("changes from one reading to the next" in line for line in report(tmp_path)["warnings"])


def test_a_function_in_a_copy_leaves_no_trace_and_its_errors_arrive():
    kept = []
    assert in_a_copy(lambda: kept.append(1) or random.random() or os.getpid(), 5) is not None
    assert kept == []
    assert in_a_copy(os.getpid, 5) != os.getpid()
    with pytest.raises(KeyError, match="missing"):
        in_a_copy(lambda: {}["missing"], 5)
    for bad in (lambda: time.sleep(9), lambda: os._exit(3)):
        with pytest.raises(ForkFailed, match="no answer"):
            in_a_copy(bad, 0.3)


def test_a_system_without_fork_leaves_batches_to_the_host(tmp_path, monkeypatch):
    monkeypatch.delattr(forked_process.os, "fork")
    trainer = run(tmp_path, bert(), rows(**LABELS))
    trainer.train()
    assert any(f"cannot copy a process; {AS_HOST}" in line for line in report(tmp_path)["warnings"])


# -- collators -----------------------------------------------------------------------------------------------------


def padded(samples, width):
    """`pad`, and then to `width` tokens."""
    batch = pad(samples)
    missing = width - batch["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask"):
        batch[name] = nn.functional.pad(batch[name], (0, missing))
    return batch


RULES = {
    "a fixed length": lambda samples: padded(samples, 52),
    "the longest sample of all": lambda samples: padded(samples, 40),
    "a multiple": lambda samples: padded(samples, -(-max(len(s["input_ids"]) for s in samples) // 5) * 5),
    "one more": lambda samples: padded(samples, 1 + max(len(s["input_ids"]) for s in samples)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("buckets", ["auto", [16, 56]])
def test_a_collator_that_pads_by_a_rule_of_its_own_is_not_overruled(tmp_path, rule, buckets):
    def make():
        shapes = []

        def collate(samples):
            batch = RULES[rule](samples)
            shapes.append((sorted(len(s["input_ids"]) for s in samples), batch["input_ids"].shape))
            return batch

        return rows(**LABELS), lambda: shapes, collate

    ours, theirs = both(tmp_path, make, options={"buckets": buckets}, max_steps=-1, num_train_epochs=1)
    assert ours == theirs
    assert len(ours[0]) == 12
    found = report(tmp_path / "True")
    assert [shape[1] for shape in found["shapes"]["seen"]] == sorted({shape[1] for _, shape in ours[0]})
    assert any(f"the collator pads by a rule of its own; {AS_HOST}" in line for line in found["warnings"])


def test_a_batch_of_another_length_than_its_longest_sample_s_stays_as_it_came():
    collate = BucketCollator(RULES["a fixed length"], [16, 56])
    assert collate(rows(2, **LABELS))["input_ids"].shape == (2, 52)


def test_a_collator_is_asked_once_a_batch(tmp_path):
    def make():
        calls = []
        return rows(**LABELS), lambda: calls, lambda samples: calls.append(len(samples)) or pad(samples)

    ours, theirs = both(tmp_path, make, max_steps=-1, num_train_epochs=2)
    assert ours[0] == theirs[0] == [2] * 24
    assert report(tmp_path / "True")["shapes"]["buckets"]


def test_predictions_are_as_wide_as_the_host_s(tmp_path):
    data = rows(labels=lambda i, n: [1] * n, longest=37)
    collate = partial(pad, along=("input_ids", "attention_mask", "labels"), fill={"labels": -100})
    wide = []
    for plug in (True, False):
        model = bert(BertForTokenClassification, num_labels=3)
        trainer = run(tmp_path, model, data, plug=plug, extra={"data_collator": collate}, per_device_eval_batch_size=4)
        found = trainer.predict(TokenRows(data))
        wide.append((found.predictions.shape, found.label_ids.tolist()))
    assert wide[0] == wide[1]
    assert wide[0][0] == (24, 37, 3)


# -- losses that cover padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", ["auto", [16, 48]])
def test_question_answering_keeps_the_host_s_lengths_and_is_named_where_they_differ(tmp_path, buckets):
    answers = {"start_positions": lambda i, n: 0, "end_positions": lambda i, n: n - 1}
    made = []
    for plug in (True, False):
        trainer = run(
            tmp_path, bert(BertForQuestionAnswering), rows(**answers), plug=plug, options={"buckets": buckets}
        )
        trainer.train()
        made.append(losses(trainer))
    assert made[0] == pytest.approx(made[1], rel=1e-5)
    assert report(tmp_path)["window"]["approximate_terms"] == []
    trainer = run(tmp_path, bert(BertForQuestionAnswering), rows(**answers), gradient_accumulation_steps=4)
    trainer.train()
    assert any("covers padding" in term for term in report(tmp_path)["window"]["approximate_terms"])


def test_a_loss_of_the_user_that_reads_padding_has_the_host_s_lengths(tmp_path):
    class Distils(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, output_hidden_states=True)
            loss = outputs.hidden_states[-1].abs().mean()  # over every position, padded ones too
            return (loss, outputs) if return_outputs else loss

    made = []
    for plug in (True, False):
        trainer = run(tmp_path, bert(), rows(**LABELS), plug=plug)
        trainer.__class__ = Distils
        trainer.train()
        made.append(losses(trainer))
    assert made[0] == pytest.approx(made[1], rel=1e-5)
    assert any("compute_loss is your own, and may read padding" in line for line in report(tmp_path)["warnings"])


# -- loaders of the user -------------------------------------------------------------------------------------------


def test_a_loader_of_the_user_is_built_once_by_a_late_callback_too(tmp_path):
    built = []

    class Own(Trainer):
        def get_train_dataloader(self):
            built.append(0)
            return super().get_train_dataloader()

    trainer = run(tmp_path, bert(), rows(**LABELS), plug=False)
    trainer.__class__ = Own
    from plugins.hf import AccelCallback

    late = AccelCallback()
    trainer.add_callback(late)
    trainer.train()
    assert built == [0]
    assert len(losses(trainer)) == 4
