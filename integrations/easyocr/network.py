"""The recognizer networks, taken from the installed easyocr package, and how wide pictures become frames."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

Features = Literal["VGG", "ResNet"]
MODULES: dict[str, str] = {"VGG": "easyocr.model.vgg_model", "ResNet": "easyocr.model.model"}


def build(features: Features, classes: int, params: dict[str, int]) -> nn.Module:
    """EasyOCR's own `Model` (VGG or ResNet, BiLSTM, CTC) with `classes` outputs, the blank included."""
    from importlib import import_module

    model: nn.Module = import_module(MODULES[features]).Model(num_class=classes, **params)
    return model


def frames(features: Features, width: int) -> int:
    """T, the frames that a picture `width` px wide becomes: 600 -> 149 for VGG, 151 for ResNet."""
    return width // 4 - 1 if features == "VGG" else width // 4 + 1


def read(model: nn.Module, images: Tensor) -> Tensor:
    """Logits [B, T, C] of images [B, 1, H, W]. EasyOCR's forward takes a text that CTC never looks at."""
    logits: Tensor = model(images, None)
    return logits


def frozen_parts(model: Any, features: bool, sequence: bool) -> list[str]:
    """Stops the gradients of the parts named in the configuration; returns their names."""
    names = [name for name, wanted in (("FeatureExtraction", features), ("SequenceModeling", sequence)) if wanted]
    for name in names:
        getattr(model, name).requires_grad_(False)
    return names
