"""Text lines and their labels: official leaf folders, a plain folder with labels.csv, Hugging Face data sets.

Labels are text and stay as written: `0012`, `1.50`, `True`, `"x, y"`. A row that cannot be trained on is left out,
counted by reason and listed by name; a set that is empty after that is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from integrations.easyocr.charset import fold_case as fold_case  # a name of this file too
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.images import HIDDEN, UNDECODABLE, find_picture, grey_of, is_whole, read_grey, size_of
from integrations.easyocr.settings import Settings
from integrations.easyocr.text import Spelling, named

HEADER = "filename,words"
OTHERS = ("gt.txt", "rec_gt*.txt", "data.mdb")  # labels of deep-text-recognition-benchmark, PaddleOCR, and an LMDB
# The Reader scales to a height and keeps the whole width, so one odd crop could take all memory. Lines across a page
# are up to some 40 times as long as high; the fewest crops of 50 that a forward takes (4) are still below what the
# official trainer holds at once, 32 of 600 x 64 px.
LONGEST = 50  # times the shorter side


@dataclass(frozen=True)
class Line:
    """One text line: its picture (a path, or a row of a data set), label and size in px, EXIF orientation applied."""

    name: str
    label: str
    width: int
    height: int
    path: Path | None = None
    row: int | None = None


@dataclass
class Skipped:
    """Rows left out: counts by reason, and the first names of each.

    kept: lines that are left; too_long: characters of every label over batch_max_length; remarks: what was done to
    labels that are kept.
    """

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    listed: int = 20
    kept: int = 0
    too_long: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """All rows that were read."""
        return self.kept + self.counts.total()

    def add(self, reason: str, name: str) -> None:
        """Count a line that is left out, and keep the first few names."""
        self.counts[reason] += 1
        known = self.names.setdefault(reason, [])
        if len(known) < self.listed:
            known.append(name)

    def sentences(self) -> list[str]:
        """One line per reason, with the first few names."""
        return [
            f"{count} left out, {reason}: {', '.join(self.names[reason])}" + (" …" if count > self.listed else "")
            for reason, count in self.counts.items()
        ]

    def too_long_told(self, most: int) -> list[str]:
        """What `batch_max_length` costs, and the value that costs nothing."""
        if not self.too_long:
            return []
        return [
            f"{len(self.too_long)} of {self.rows} lines are lost, labels longer than batch_max_length={most}: "
            f"batch_max_length: {max(self.too_long)} keeps them all"
        ]


@dataclass
class LineSet:
    """Lines of one data set. `source` is the Hugging Face data set where rows are not files."""

    name: str
    lines: list[Line]
    source: Any = None
    image_column: str = "image"
    _whole: dict[int, tuple[int, int]] = field(default_factory=dict)

    def grey(self, index: int) -> np.ndarray | None:
        """Picture as uint8 [h, w], read as `easyocr.Reader` reads a file; None if it is gone or cannot be decoded."""
        line = self.lines[index]
        try:
            if line.path is None:
                return grey_of(self.source[line.row][self.image_column])
            # The Reader's decoder fills what a cut-off file lacks with black; that is no line to learn from. A file
            # that was written since is looked at again.
            status = line.path.stat()
            version = (status.st_mtime_ns, status.st_size)
            if self._whole.get(index) != version and not is_whole(line.path):
                return None
            self._whole[index] = version
            return read_grey(line.path)
        except UNDECODABLE:
            return None


def read_labels(leaf: Path) -> list[tuple[str, str]]:
    """(file name, label) of every row of `leaf/labels.csv`, split at the first comma; UTF-8 with or without BOM."""
    path = leaf / "labels.csv"
    if not path.is_file():
        raise EasyOCRError(f"{path}: no such file; expected a labels.csv with header {HEADER}")
    try:
        # Only line feeds end a row (reading turns \r\n and \r into them); `splitlines` cuts labels at U+2028 too.
        rows = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise EasyOCRError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); expected UTF-8") from None
    header = rows[0]
    if [name.strip() for name in header.split(",")] != HEADER.split(","):
        raise EasyOCRError(f"{path}: header is {header!r}, expected {HEADER!r}")
    pairs = []
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        name, comma, label = row.partition(",")
        if not comma:
            raise EasyOCRError(f"{path}: line {number} is {row!r}, expected two fields separated by a comma: {HEADER}")
        pairs.append((name, label))
    return pairs


def leaves(root: Path, name: str) -> list[Path]:
    """Folders under `root`, itself included, that hold a labels.csv; sorted by path. `name`: the set's, `field=...`."""
    if not root.is_dir():
        why = "is a file" if root.is_file() else "no such folder"
        raise EasyOCRError(f"{name.partition('=')[0]}={root}: {why}; expected folders of images with a labels.csv")
    found = sorted(path.parent for path in root.rglob("labels.csv"))
    if not found:
        other = next((path for name in OTHERS for path in root.rglob(name)), None)
        instead = f" ({other.name} of another trainer is not read: write its rows as NAME,TEXT)" if other else ""
        raise EasyOCRError(
            f"{root}: no labels.csv in it or below{instead}; expected one a folder, with header {HEADER}"
        )
    return found


def read_folder(root: Path, name: str, skipped: Skipped) -> LineSet:
    """Every readable row of every leaf under `root`. Missing and corrupt pictures are counted in `skipped`."""
    lines = []
    for leaf in leaves(root, name):
        for file_name, label in read_labels(leaf):
            path = find_picture(leaf, file_name)
            size = size_of(path)
            if isinstance(size, str):
                skipped.add(size, str(path))
            else:
                lines.append(Line(str(path), label, *size, path=path))
    return LineSet(name, lines)


def read_dataset(source: Any, name: str, image_column: str, text_column: str, skipped: Skipped) -> LineSet:
    """A Hugging Face `datasets.Dataset` with an image and a text column (decoded `datasets.Image`)."""
    if isinstance(source, Mapping):
        raise EasyOCRError(
            f"{name}: holds several data sets; give one of them, such as dataset[{next(iter(source), 'train')!r}]"
        )
    if not hasattr(source, "select_columns") or not hasattr(source, "__len__"):
        raise EasyOCRError(f"{name}: {type(source).__name__}: expected a datasets.Dataset (no stream) or a folder")
    columns = list(source.column_names)
    for key, column in (("image_column", image_column), ("text_column", text_column)):
        if column not in columns:
            raise EasyOCRError(f"{key}={column}: no such column in {name}; allowed are {', '.join(columns)}")
    plain = source.with_format(None)
    texts = plain.select_columns([text_column])
    if source.format["type"] != "custom":  # a format gives arrays in the place of pictures; a transform is meant
        source = plain
    lines = []
    for row in range(len(source)):
        label = texts[row][text_column]
        if not isinstance(label, str):
            raise EasyOCRError(f"{name}: row {row}, column {text_column} holds {label!r}; expected text")
        try:
            picture = source[row][image_column]
            width, height = picture.size
            hidden = picture.has_transparency_data and np.ptp(grey_of(picture)) == 0
        except UNDECODABLE:
            skipped.add("corrupt image", f"{name} row {row}")
            continue
        if hidden:
            skipped.add(HIDDEN, f"{name} row {row}")
            continue
        lines.append(Line(f"{name} row {row}", label, width, height, row=row))
    return LineSet(name, lines, source, image_column)


def read_any(source: Any, name: str, settings: Settings, skipped: Skipped) -> LineSet:
    """A folder of leaves, a plain folder, a data set saved with `save_to_disk`, or a data set object."""
    if not isinstance(source, (str, Path)):
        return read_dataset(source, name, settings.image_column, settings.text_column, skipped)
    root = Path(source)
    if any((root / saved).is_file() for saved in ("dataset_info.json", "dataset_dict.json")):
        from datasets import load_from_disk

        return read_dataset(load_from_disk(str(root)), name, settings.image_column, settings.text_column, skipped)
    return read_folder(root, name, skipped)


def keep_trainable(lines: LineSet, characters: str, settings: Settings, skipped: Skipped) -> LineSet:
    """Labels in the set's spelling, without the lines that cannot be trained on.

    Left out are labels that are empty, too long, or hold unknown characters, and crops too long for `preprocess:
    reader`. `data_filtering_off` keeps too long labels, as the official trainer does; a label with a character that has
    no class cannot be encoded at all, and is left out and counted either way.

    Raises:
        EasyOCRError: nothing is left.
    """
    known, kept, spelling = set(characters), [], Spelling(characters, settings)
    outside: dict[str, set[str]] = {}  # by line
    for line in lines.lines:
        label = spelling(line.label)
        unknown = set(label) - known
        if not label:
            skipped.add("empty label", line.name)
        elif unknown:
            outside[line.name] = unknown
        elif len(label) > settings.batch_max_length and not settings.data_filtering_off:
            skipped.add(f"label longer than batch_max_length={settings.batch_max_length}", line.name)
            skipped.too_long.append(len(label))
        elif settings.preprocess == "reader" and max(line.width, line.height) > LONGEST * min(line.width, line.height):
            skipped.add(f"longer side over {LONGEST} times the shorter one", line.name)
        else:
            kept.append(Line(line.name, label, line.width, line.height, line.path, line.row))
    all_unknown = sorted(set().union(*outside.values()))
    for name in outside:
        skipped.add(f"characters outside the set ({named(all_unknown)})", name)
    skipped.kept += len(kept)
    skipped.remarks += spelling.sentences()
    if not kept:
        told = [*skipped.too_long_told(settings.batch_max_length), *skipped.sentences()]
        reasons = "; ".join(told)[:400] or "it has no rows"
        use = "read" if lines.name == "valid_data" else "train on"
        raise EasyOCRError(f"{lines.name}: no line is left to {use} ({reasons})")
    return LineSet(lines.name, kept, lines.source, lines.image_column)
