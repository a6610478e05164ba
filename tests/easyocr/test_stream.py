from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from integrations.easyocr.augment import Augment, Noise
from integrations.easyocr.bucketing import Batch, WidthBatches
from integrations.easyocr.data import Skipped, read_folder
from integrations.easyocr.labels import converter
from integrations.easyocr.preprocess import Preprocess
from integrations.easyocr.stream import Lines, loader
from tests.easyocr.conftest import numbers, write_folder


@pytest.fixture
def lines(tmp_path):
    folder = write_folder(tmp_path / "x", numbers(12))
    found = read_folder(folder, "x", Skipped())
    return Lines([found], Preprocess("reader", 32, 600), converter("0123456789"), "VGG", augment=Augment(5))


def test_923_many_epochs_and_worker_counts_give_the_same_batches(lines):
    batches = WidthBatches(lines.widths(), [max(lines.widths())], 5, seed=1)
    runs = []
    for workers in (0, 2):
        torch.manual_seed(workers)
        runs.append(list(islice(loader(lines, batches.from_position(0), workers), 8)))  # 3 batches an epoch
    for a, b in zip(*runs, strict=True):
        assert a.labels == b.labels
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.classes, b.classes)
    assert not torch.equal(runs[0][0].images, runs[0][3].images)


def test_making_a_loader_leaves_the_random_state_alone(lines):
    before = torch.get_rng_state()
    next(iter(loader(lines, [Batch((0,), 200, 0)], 0)))
    assert torch.equal(before, torch.get_rng_state())


def test_a_picture_that_cannot_be_decoded_is_left_out_and_named(lines):
    lines.sets[0].lines[3].path.write_bytes(b"\x89PNG broken")
    batch = lines[Batch((2, 3, 4), 200, 0)]
    assert len(batch) == 2
    assert batch.unreadable == [str(lines.sets[0].lines[3].path)]
    empty = lines[Batch((3,), 200, 0)]
    assert len(empty) == 0
    assert empty.images.shape == (0, 1, 32, 200)


def test_padding_and_infeasible_labels_are_counted(lines):
    batch = lines[Batch((0, 1), 240, 0)]
    widths = lines.widths()
    assert batch.images.shape == (2, 1, 32, 240)
    assert batch.padding == 2 * 240 - widths[0] - widths[1]
    assert batch.infeasible == 0


def test_noise_is_of_its_width_and_stays_in_range():
    torch.manual_seed(0)
    grey = torch.full((1, 64, 256), 128, dtype=torch.uint8)
    noisy = Noise(0.04)(grey)
    assert noisy.dtype == torch.uint8
    assert float((noisy.float() - 128).std()) == pytest.approx(0.04 * 255, rel=0.05)
    assert abs(float((noisy.float() - 128).mean())) < 0.5
    white = Noise(0.04)(torch.full_like(grey, 255))
    assert int(white.min()) > 180  # nothing wraps around


def test_augmentation_changes_pictures_and_keeps_their_form():
    crop = np.random.default_rng(0).integers(0, 255, (32, 90), dtype=np.uint8)
    augment = Augment(1)
    changed = [augment(crop, 0, line) for line in range(12)]
    assert all(c.shape == crop.shape and c.dtype == np.uint8 for c in changed)
    assert sum(not np.array_equal(c, crop) for c in changed) >= 6
    assert np.array_equal(augment(crop, 0, 3), changed[3])
    assert any(not np.array_equal(augment(crop, 1, line), changed[line]) for line in range(12))


def test_a_wide_batch_goes_through_in_parts(lines):
    batch = lines[Batch(tuple(range(12)), 240, 0)]
    (whole,) = batch.parts(12 * 240)
    assert whole.labels == batch.labels
    halves = list(batch.parts(6 * 240, least=2))
    assert [len(part) for part in halves] == [6, 6]
    assert [len(part) for part in batch.parts(1, least=3)] == [3, 3, 3, 3]
    assert [len(part) for part in batch.parts(1, least=7)] == [12]
    assert torch.equal(torch.cat([part.images for part in halves]), batch.images)
    assert torch.equal(torch.cat([part.classes for part in halves]), batch.classes)
    for part in halves:
        assert int(part.lengths.sum()) == len(part.classes)
