"""From a grey picture to a recognizer's input.

`reader`: exactly what `easyocr.Reader.recognize` does with a crop (its own resize: OpenCV, bilinear, floor; its own
padding: the next whole multiple of the height). `official`: what the official trainer does (Pillow, bicubic, ceil,
squeezed to imgW). Training on one and reading with the other costs accuracy; `reader` is the default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_SECOND_LOOK = 0.5  # contrast the Reader raises a doubtful crop to


@dataclass(frozen=True)
class Preprocess:
    """How a crop is scaled to `height` px and how wide it may become; `width_limit` binds the official way only."""

    kind: Literal["reader", "official"]
    height: int
    width_limit: int
    keep_ratio: bool = True

    def scaled_width(self, width: int, height: int) -> int:
        """Width in px of a `width` x `height` picture after scaling."""
        if self.kind == "reader":
            scaled = int(self.height * (max(width, height) / min(width, height)))
            # A tall picture becomes (height, scaled) first and is squeezed to the model's height afterwards.
            first, tall = (self.height, scaled) if width < height else (scaled, self.height)
            return min(math.ceil(self.height * (first / float(tall))), self.reader_width(width, height))
        if not self.keep_ratio:
            return self.width_limit
        return min(math.ceil(self.height * (width / float(height))), self.width_limit)

    def reader_width(self, width: int, height: int) -> int:
        """Width in px that the input of this picture is padded to when it is read alone."""
        if self.kind == "official":
            return self.width_limit
        return math.ceil(max(width, height) / min(width, height)) * self.height

    def scale(self, grey: np.ndarray, contrast: float = 0.0) -> np.ndarray:
        """uint8 [h, w] -> uint8 [height, scaled width]; `contrast` raises a low contrast to that much first."""
        from easyocr.recognition import adjust_contrast_grey
        from easyocr.utils import compute_ratio_and_resize

        height, width = grey.shape
        target = self.scaled_width(width, height)
        if self.kind == "reader":
            grey, _ = compute_ratio_and_resize(grey, width, height, self.height)
        if contrast > 0:
            grey = np.asarray(adjust_contrast_grey(grey, target=contrast), dtype=np.uint8)
        if grey.shape == (self.height, target):
            return grey
        return np.asarray(Image.fromarray(grey).resize((target, self.height), Image.Resampling.BICUBIC))

    def second_look(self, grey: np.ndarray) -> np.ndarray:
        """The crop with raised contrast, which the Reader tries where it doubts its first reading."""
        return self.scale(grey, _SECOND_LOOK)


def pad_batch(crops: list[np.ndarray], width: int) -> Tensor:
    """uint8 crops [H, w_i] -> float32 [B, 1, H, width] in -1..1, each padded right with its last column."""
    batch = torch.empty(len(crops), 1, crops[0].shape[0], width)
    for row, crop in zip(batch, crops, strict=True):
        pixels = torch.from_numpy(np.array(crop)).float().div_(255).sub_(0.5).div_(0.5)
        row[0, :, : crop.shape[1]] = pixels
        row[0, :, crop.shape[1] :] = pixels[:, -1:]
    return batch
