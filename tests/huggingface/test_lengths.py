"""Reading the lengths of samples: cheaply, within a time, and with what goes along them."""

from __future__ import annotations

import time

import datasets
import pytest
import torch

from integrations.huggingface import lengths
from integrations.huggingface.lengths import Form, Unread, form_of, survey, survey_dataset


def samples(numbers, **values):
    return [{"input_ids": [7] * n, **{k: f(i) for k, f in values.items()}} for i, n in enumerate(numbers)]


def test_lengths_from_a_column_or_from_samples():
    data = datasets.Dataset.from_list(samples([3, 1, 4], labels=lambda i: 0))
    for columns in (data, data.with_format("torch"), data.add_column("length", [7, 7, 7])):
        assert survey_dataset(columns, "input_ids").lengths == [3, 1, 4]
    assert survey_dataset(data.select([2, 0]), "input_ids").lengths == [4, 3]
    assert survey_dataset(samples([2, 2]), "input_ids").lengths == [2, 2]
    assert survey_dataset([{"pixel_values": torch.zeros(3, 8, 8)}], "pixel_values") is None


def test_the_forms_of_values():
    assert form_of([(3, (3,)), (4, (4,))]) is Form.ALONG
    assert form_of([(3, (3, 4)), (5, (5, 4))]) is Form.ALONG
    assert form_of([(3, (7,)), (7, (7,))]) is Form.FIXED
    assert form_of([(3, ()), (3, ())]) is Form.FIXED
    assert form_of([(3, (2,)), (4, (9,))]) is Form.OWN
    assert form_of([(3, (3, 3)), (4, (4, 4))]) is Form.UNCLEAR
    assert form_of([(5, (5,)), (5, (5,))]) is Form.UNCLEAR


def test_labels_with_a_length_of_their_own():
    found = survey(samples([3, 1, 4], label=lambda i: [1] * (5 - 2 * i)), "input_ids")
    assert found.forms["labels"] is Form.OWN
    assert found.label_lengths == [5, 3, 1]
    partly = [*samples([3, 1], labels=lambda i: [1] * (4 + i)), *samples([6])]
    assert survey(partly, "input_ids").forms["labels"] is Form.UNCLEAR


def test_reading_ends_when_its_time_is_up(monkeypatch):
    monkeypatch.setattr(lengths, "BUDGET", 0.05)
    read = []

    def slow():
        for sample in samples(range(1, 200)):
            time.sleep(0.01)
            read.append(sample)
            yield sample

    with pytest.raises(Unread, match=r"samples took 0.05 s to read"):
        survey(slow(), "input_ids")
    assert len(read) < 10


def test_reading_draws_no_random_numbers():
    before = torch.get_rng_state()
    survey(({"input_ids": torch.randint(9, (n,))} for n in (3, 4)), "input_ids")
    assert torch.equal(torch.get_rng_state(), before)


def test_columns_are_measured_without_being_read():
    data = datasets.Dataset.from_list(samples([1 + i % 40 for i in range(1000)], labels=lambda i: [1] * (i % 5 + 1)))
    read = []
    found = survey_dataset(data.with_transform(lambda batch: read.append(0) or batch), "input_ids")
    assert found.lengths == [1 + i % 40 for i in range(1000)]
    assert found.label_lengths == [i % 5 + 1 for i in range(1000)]
    assert len(read) == 250
    cut = data.with_transform(lambda batch: {**batch, "input_ids": [ids[:4] for ids in batch["input_ids"]]})
    assert max(survey_dataset(cut, "input_ids").lengths) == 4
