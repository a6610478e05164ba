"""Labels as classes, and the CTC loss over padded frames.

Every frame counts, padding included, as in the Reader's decoding: the model learns to stay silent there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def converter(characters: str) -> Any:
    """The Reader's own label converter for this character set."""
    from easyocr.utils import CTCLabelConverter

    return CTCLabelConverter(characters)


def encode(labels: Sequence[str], codec: Any) -> tuple[Tensor, Tensor]:
    """Classes [sum of lengths] and lengths [B], int64."""
    classes, lengths = codec.encode(list(labels))
    return classes.long(), lengths.long()


def frames_needed(label: str) -> int:
    """Fewest frames that can spell `label`: one a character and a blank between equal neighbours."""
    return len(label) + sum(a == b for a, b in pairwise(label))


def infeasible(labels: Sequence[str], frames: int) -> int:
    """How many labels need more than `frames` frames; CTC gives them no gradient."""
    return sum(frames_needed(label) > frames for label in labels)


def ctc_loss(logits: Tensor, classes: Tensor, lengths: Tensor) -> Tensor:
    """Mean over samples of loss / length, in fp32, outside autocast and cuDNN; infeasible labels give zero.

    Args:
        logits: [B, T, C], any float dtype; blank is class 0.
        classes: [sum of lengths], of all labels one after the other.
        lengths: [B], of the labels, on the CPU.
    """
    with torch.autocast(logits.device.type, enabled=False), torch.backends.cudnn.flags(enabled=False):
        log_probabilities = F.log_softmax(_at_least_fp32(logits), dim=2).transpose(0, 1)
        frames = [logits.size(1)] * logits.size(0)
        sizes: Any = lengths.tolist()  # they are numbers to torch: no tensor of another device, no read from ours
        return F.ctc_loss(log_probabilities, classes, frames, sizes, blank=0, reduction="mean", zero_infinity=True)  # type: ignore[arg-type]


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
