"""Reading lines as `easyocr.Reader.recognize` reads them, in batches: validation equals what users will see.

A crop is padded to the Reader's own width for it; one read with a confidence under 0.1 is read again with raised
contrast, and the more confident reading counts. Formula of the confidence: `easyocr.recognition.custom_mean`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from integrations.easyocr.data import LineSet
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.labels import ctc_loss, encode
from integrations.easyocr.network import read
from integrations.easyocr.preprocess import Preprocess, pad_batch

_DOUBT = 0.1  # confidence under which the Reader looks a second time (its contrast_ths)


@dataclass
class Readings:
    """One text, confidence 0..1 and label a line, in the order of `indices`; loss: mean CTC over these lines.

    unreadable: names of the lines left out, whose pictures are gone or cannot be decoded.
    """

    texts: list[str]
    confidences: list[float]
    labels: list[str]
    indices: list[int]
    loss: float
    unreadable: list[str]

    def samples(self, lines: LineSet, count: int = 8) -> list[tuple[np.ndarray, str, str]]:
        """(grey picture, read, label) of the first lines."""
        found = zip(self.indices[:count], self.texts, self.labels, strict=False)
        pictures = [(lines.grey(index), read, label) for index, read, label in found]
        return [(grey, read, label) for grey, read, label in pictures if grey is not None]


@torch.no_grad()
def read_lines(
    model: nn.Module,
    lines: LineSet,
    preprocess: Preprocess,
    codec: Any,
    device: torch.device,
    *,
    batch_size: int = 32,
    decode: Literal["greedy", "beamsearch"] = "greedy",
    widen: Callable[[int], int] = lambda width: width,
) -> Readings:
    """Reads every line with `model` in eval mode and full precision; its training mode is put back.

    Args:
        model: [B, 1, H, W] -> [B, T, C] logits.
        lines: with their labels.
        preprocess: from a grey picture to the model's input.
        codec: between labels and classes.
        device: of the model.
        batch_size: lines read together; what they read does not depend on it.
        decode: as the Reader names it.
        widen: maps a line's own input width in px to the one it is padded to (to test that padding stays silent).

    Raises:
        EasyOCRError: no picture of `lines` can be decoded: a score over nothing would rank weights.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, line in enumerate(lines.lines):
        groups[widen(preprocess.reader_width(line.width, line.height))].append(index)
    found: dict[int, tuple[str, float]] = {}
    loss, unreadable = 0.0, []
    training = model.training
    model.eval()
    try:
        for width in sorted(groups):
            members = groups[width]
            for at in range(0, len(members), batch_size):
                pictures = {index: lines.grey(index) for index in members[at : at + batch_size]}
                unreadable += [lines.lines[index].name for index, grey in pictures.items() if grey is None]
                good = {index: grey for index, grey in pictures.items() if grey is not None}
                if not good:
                    continue
                logits = _logits(model, [preprocess.scale(grey) for grey in good.values()], width, device)
                classes, lengths = encode([lines.lines[index].label for index in good], codec)
                loss += float(ctc_loss(logits, classes.to(logits.device), lengths)) * len(good)
                first = decoded(logits, codec, decode)
                doubtful = [i for i, (_, confidence) in enumerate(first) if confidence < _DOUBT]
                if doubtful and preprocess.kind == "reader":
                    greys = list(good.values())
                    crops = [preprocess.second_look(greys[i]) for i in doubtful]
                    second = decoded(_logits(model, crops, width, device), codec, decode)
                    for i, again in zip(doubtful, second, strict=True):
                        first[i] = first[i] if first[i][1] > again[1] else again
                found.update(zip(good, first, strict=True))
    finally:
        model.train(training)
    if not found:
        such = f", such as {unreadable[0]}" if unreadable else ""
        raise EasyOCRError(f"{lines.name}: none of its pictures can be decoded{such}")
    order = sorted(found)
    return Readings(
        [found[i][0] for i in order],
        [found[i][1] for i in order],
        [lines.lines[i].label for i in order],
        order,
        loss / len(order),
        unreadable,
    )


def decoded(logits: Tensor, codec: Any, decode: str = "greedy") -> list[tuple[str, float]]:
    """(text, confidence) of every row of logits [B, T, C]."""
    from easyocr.recognition import custom_mean

    probabilities = logits.float().softmax(2).cpu()
    best, classes = probabilities.max(2)
    if decode == "beamsearch":
        texts = codec.decode_beamsearch(probabilities.numpy())
    else:
        texts = codec.decode_greedy(classes.flatten().numpy(), [logits.size(1)] * logits.size(0))
    pairs = []
    for text, values, indices in zip(texts, best.numpy(), classes.numpy(), strict=True):
        seen = values[indices != 0]
        pairs.append((str(text), float(custom_mean(seen if len(seen) else np.zeros(1)))))
    return pairs


def _logits(model: nn.Module, crops: list[np.ndarray], width: int, device: torch.device) -> Tensor:
    width = max(width, *(crop.shape[1] for crop in crops))
    return read(model, pad_batch(crops, width).to(device))
