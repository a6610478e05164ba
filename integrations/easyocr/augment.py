"""Augmentation of the kinds that OCR training uses, from torchvision: blur, noise, contrast, slight perspective.

Each crop's draw depends on (seed, epoch, line) alone: worker counts and resuming change nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2


class Noise(nn.Module):
    """Gaussian noise on uint8, as torchvision adds it; one of torch 2.6 adds it to floats only.

    Args:
        sigma: its standard deviation, of a range of 1.
    """

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, picture: Tensor) -> Tensor:
        """Any shape, uint8 in and out."""
        noise = (torch.randn_like(picture, dtype=torch.float32) * (self.sigma * 255)).to(torch.int16)
        return (picture + noise).clamp(0, 255).to(torch.uint8)


class Augment:
    """Changes a scaled crop, uint8 [H, W] -> uint8 [H, W]; each kind is applied to a part of the crops."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._tone = v2.RandomApply([v2.ColorJitter(brightness=0.3, contrast=0.4)], p=0.5)
        self._blur = v2.RandomApply([v2.GaussianBlur(kernel_size=5, sigma=(0.3, 1.5))], p=0.25)
        self._noise = v2.RandomApply([Noise(0.04)], p=0.25)

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
