from __future__ import annotations

import pytest
import torch

from integrations.easyocr.network import build, frames, frozen_parts, read


@pytest.mark.parametrize("features", ["VGG", "ResNet"])
def test_frames_follow_from_the_width(features):
    model = build(features, 11, {"input_channel": 1, "output_channel": 16, "hidden_size": 8}).eval()
    for width in (32, 37, 64, 102, 160):
        assert read(model, torch.zeros(1, 1, 64, width)).shape == (1, frames(features, width), 11)
    assert frames("VGG", 600) == 149


def test_freezing_stops_the_gradients_of_the_named_parts():
    model = build("VGG", 5, {"input_channel": 1, "output_channel": 16, "hidden_size": 8})
    assert frozen_parts(model, True, False) == ["FeatureExtraction"]
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"SequenceModeling", "Prediction"}
