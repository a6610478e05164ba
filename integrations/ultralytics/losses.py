"""Training and validation loss of a run, from the `results.csv` that the host writes and a resumed run goes on with."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from integrations.contract import LossFacts


def read_losses(results: Path, into: LossFacts) -> None:
    """Fill in the sums of the host's loss columns, an epoch each; nothing where there is no such file.

    Args:
        results: the host's csv, whose columns are `epoch`, `train/NAME_loss`, `val/NAME_loss` and others; a row that
            begins an epoch anew (a run that was killed before its checkpoint) replaces the later ones.
        into: the report's losses.
    """
    rows: list[tuple[float, float | None, float | None]] = []
    try:
        with results.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(file, skipinitialspace=True):
                epoch = _number(row.get("epoch"))
                if epoch is None:
                    continue
                while rows and rows[-1][0] >= epoch:
                    rows.pop()
                rows.append((epoch, _sum(row, "train/"), _sum(row, "val/")))
    except (OSError, csv.Error):
        return
    into.unit = "epoch"
    into.train = [(epoch, loss) for epoch, loss, _ in rows]
    into.valid = [(epoch, loss) for epoch, _, loss in rows]
    for kind in ("train", "valid"):
        if all(loss is None for _, loss in getattr(into, kind)):  # no such columns, or val=False
            setattr(into, kind, [])


def _sum(row: dict[str, str], kind: str) -> float | None:
    """Of an epoch's terms, None where one is missing or not finite."""
    terms = [_number(value) for name, value in row.items() if name and name.startswith(kind) and "loss" in name]
    known = [term for term in terms if term is not None]
    return sum(known) if known and len(known) == len(terms) else None


def _number(text: object) -> float | None:
    try:
        value = float(str(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
