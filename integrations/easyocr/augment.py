"""Augmentation of the kinds that OCR training uses, from torchvision: blur, noise, contrast, slight perspective.

Each crop's draw depends on (seed, epoch, line) alone: worker counts and resuming change nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torchvision.transforms import v2


class Augment:
    """Changes a scaled crop, uint8 [H, W] -> uint8 [H, W]; each kind is applied to a part of the crops."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._tone = v2.RandomApply([v2.ColorJitter(brightness=0.3, contrast=0.4)], p=0.5)
        self._blur = v2.RandomApply([v2.GaussianBlur(kernel_size=5, sigma=(0.3, 1.5))], p=0.25)
        self._noise = v2.RandomApply([v2.GaussianNoise(sigma=0.04)], p=0.25)

    def __call__(self, crop: np.ndarray, epoch: int, line: int) -> np.ndarray:
        """The crop, changed at random: a pure function of (seed, epoch, line). Grey [H, W] in and out, uint8."""
        with torch.random.fork_rng(devices=[]):
            draw = np.random.SeedSequence([self.seed, epoch, line]).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(draw) % 2**63)
            picture = torch.from_numpy(np.array(crop))[None]
            # The paper's own tone fills the corners: a black wedge would be read as a stroke.
            fill = float(np.median(crop))
            picture = v2.RandomPerspective(distortion_scale=0.12, p=0.3, fill=fill)(picture)
            picture = self._noise(self._blur(self._tone(picture)))
        return np.asarray(picture[0].numpy())
