from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from easyocr.recognition import AlignCollate
from easyocr.utils import get_image_list
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from integrations.easyocr.preprocess import Preprocess, pad_batch


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 500), st.integers(3, 90), st.sampled_from([32, 48, 64, 100]))
def test_reader_preprocessing_is_the_readers_own(width, height, target):
    grey = np.random.default_rng(width).integers(0, 255, (height, width), dtype=np.uint8)
    crops, max_width = get_image_list([[0, width, 0, height]], [], grey, model_height=target)
    theirs = AlignCollate(imgH=target, imgW=int(max_width), keep_ratio_with_pad=True)([Image.fromarray(crops[0][1])])
    ours = Preprocess("reader", target, 600)
    crop = ours.scale(grey)
    assert crop.shape[1] == ours.scaled_width(width, height)
    assert torch.equal(pad_batch([crop], ours.reader_width(width, height)), theirs)


@pytest.mark.parametrize(("width", "height"), [(300, 40), (33, 50), (1000, 30), (7, 7)])
def test_official_preprocessing_is_the_official_trainers(width, height):
    """Grey, width min(ceil(H w / h), imgW), bicubic, (x - .5) / .5, padded right with the last column."""
    grey = np.random.default_rng(0).integers(0, 255, (height, width), dtype=np.uint8)
    scaled = min(math.ceil(64 * width / height), 600)
    right = np.asarray(Image.fromarray(grey).resize((scaled, 64), Image.Resampling.BICUBIC), np.float32) / 255
    right = np.pad((right - 0.5) / 0.5, ((0, 0), (0, 600 - scaled)), mode="edge")
    ours = Preprocess("official", 64, 600)
    assert ours.scaled_width(width, height) == scaled
    got = pad_batch([ours.scale(grey)], ours.reader_width(width, height))[0, 0].numpy()
    np.testing.assert_allclose(got, right, atol=1e-6)


def test_without_pad_the_official_way_squeezes_to_imgw():
    ours = Preprocess("official", 64, 600, keep_ratio=False)
    assert ours.scale(np.zeros((40, 80), np.uint8)).shape == (64, 600)
