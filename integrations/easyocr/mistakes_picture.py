"""Pictures of a finished run: training and validation curves, and a page of the worst mistakes with their crops."""

from __future__ import annotations

import io
import re
import unicodedata
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rapidfuzz.distance import Levenshtein

from integrations.easyocr.data import LineSet
from integrations.easyocr.reading import Readings
from integrations.easyocr.tensorboard_log import Row
from integrations.easyocr.writer import Writer

WORST_SHOWN = 24
# The page of mistakes, in inches: its width, a crop with its gaps, a line of a title, the page's own title.
_PAGE, _CROP, _GAP, _LINE, _HEAD = 10.0, 0.75, 0.06, 0.125, 0.4
_POINTS = 7
_FONTS = ["DejaVu Sans Mono", "DejaVu Sans"]  # the second holds Hebrew and Arabic too; both come with matplotlib
_LETTERS = int(_PAGE * 0.95 * 72 / (_POINTS * 0.62))  # of a monospaced font, on the page's whole width
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
    titles = [(f"read {read!r}", f"is {label!r}") for _, _, read, label in shown]
    columns = next((n for n in (3, 2) if all(_cells(text) <= _LETTERS // n for pair in titles for text in pair)), 1)
    wrapped = ["\n".join(part for text in pair for part in _wrapped(text, _LETTERS // columns)) for pair in titles]
    rows = [range(at, min(at + columns, len(shown))) for at in range(0, len(shown), columns)]
    heights = [_CROP + _LINE * max(wrapped[i].count("\n") + 1 for i in row) for row in rows]
    page = sum(heights) + _HEAD
    figure = Figure(figsize=(_PAGE, page))
    figure.suptitle(f"{len(wrong)} of {len(readings.texts)} lines misread; the worst {len(shown)}", y=1 - 0.15 / page)
    for number, row in enumerate(rows):
        bottom = page - _HEAD - sum(heights[: number + 1]) + _GAP
        for column, i in enumerate(row):
            place = ((column + 0.02) / columns, bottom / page, 0.96 / columns, (_CROP - 2 * _GAP) / page)
            axes = figure.add_axes(place, anchor="NW")
            axes.axis("off")
            grey = lines.grey(shown[i][1])
            axes.imshow(_BLANK if grey is None else grey, cmap="gray", vmin=0, vmax=255)
            axes.set_title(wrapped[i], fontsize=_POINTS, loc="left", parse_math=False, family=_FONTS, pad=3)
    _save(figure, path, writer)
    return [(lines.lines[index].name, read, label) for _, index, read, label in wrong]


def _cells(text: str) -> int:
    """Letters of a monospaced line that `text` takes; East Asian ones take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _wrapped(text: str, most: int) -> list[str]:
    """`text` in lines of at most `most` cells, at a space where one is near; every letter is kept."""
    lines = [""]
    for word in re.findall(r"\S+\s*|\s+", text):
        if lines[-1] and _cells(lines[-1] + word.rstrip()) > most:
            lines.append("")
        for letter in word:
            if _cells(lines[-1] + letter) > most and letter != " ":
                lines.append("")
            lines[-1] += letter
    return lines


def _save(figure: Figure, path: Path, writer: Writer) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    writer(path, lambda file: file.write(buffer.getvalue()))
