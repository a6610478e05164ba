"""Pictures of a finished run: training and validation curves, and a page of the worst mistakes with their crops."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rapidfuzz.distance import Levenshtein

from integrations.easyocr.board import Row
from integrations.easyocr.data import LineSet
from integrations.easyocr.export import Writer
from integrations.easyocr.reading import Readings

WORST_SHOWN = 24
_BLANK = np.full((32, 96), 255, dtype=np.uint8)


def curves(rows: list[Row], path: Path, writer: Writer) -> None:
    """Losses on the left, accuracy and normalised edit distance on the right, over updates."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    updates = [row.update for row in rows]
    losses.plot(updates, [row.train_loss for row in rows], marker=".", label="training")
    losses.plot(updates, [row.valid_loss for row in rows], marker=".", label="validation")
    losses.set(xlabel="update", ylabel="CTC loss / label length")
    scores.plot(updates, [row.accuracy for row in rows], marker=".", label="word accuracy")
    scores.plot(updates, [row.norm_ED for row in rows], marker=".", label="1 - edits / length")
    scores.set(xlabel="update", ylim=(0, 1.02))
    for axes in (losses, scores):
        axes.legend()
        axes.grid(alpha=0.3)
    _save(figure, path, writer)


def mistakes(readings: Readings, lines: LineSet, path: Path, writer: Writer) -> list[tuple[str, str, str]]:
    """(name, read, label) of all misread lines, worst first; the first ones drawn with their crops."""
    wrong = [
        (Levenshtein.normalized_distance(read, label), index, read, label)
        for read, label, index in zip(readings.texts, readings.labels, readings.indices, strict=True)
        if read != label
    ]
    wrong.sort(key=lambda found: (-found[0], found[1]))
    shown = wrong[:WORST_SHOWN]
    columns, rows = 3, max(1, -(-len(shown) // 3))
    figure = Figure(figsize=(10, 0.9 * rows + 0.6), layout="constrained")
    figure.suptitle(f"{len(wrong)} of {len(readings.texts)} lines misread; the worst {len(shown)}")
    for axes, found in zip(figure.subplots(rows, columns, squeeze=False).flat, [*shown, *[None] * 2], strict=False):
        axes.axis("off")
        if found is not None:
            _, index, read, label = found
            grey = lines.grey(index)
            axes.imshow(_BLANK if grey is None else grey, cmap="gray", vmin=0, vmax=255)
            axes.set_title(f"read {read!r}, is {label!r}", fontsize=7, loc="left", parse_math=False)
    _save(figure, path, writer)
    return [(lines.lines[index].name, read, label) for _, index, read, label in wrong]


def _save(figure: Figure, path: Path, writer: Writer) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    writer(path, lambda file: file.write(buffer.getvalue()))
