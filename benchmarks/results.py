"""The file of results: an entry a row, with machine, versions, date and the figures of every repeat."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Figures, Row

PACKAGES = (
    "torch", "ultralytics", "transformers", "accelerate", "lightning", "easyocr", "python-doctr",
)  # fmt: skip
FLAGS = ("avx512_bf16", "amx_bf16")


class Results:
    """Reads and writes one JSON file; every finished round is in it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def rounds(self, key: str) -> list[dict[str, Figures]]:
        """Contender -> figures, a round each."""
        return list(self.rows.get(key, {}).get("rounds", []))

    def skipped(self, key: str) -> dict[str, str]:
        return dict(self.rows.get(key, {}).get("skipped", {}))

    def add(self, row: Row, quick: bool, found: Mapping[str, Figures], skipped: Mapping[str, str]) -> None:
        """One more round of a row."""
        entry = self.rows.setdefault(row.key, {"what": row.what, "quick": quick, "rounds": [], "load": []})
        entry["rounds"].append(dict(found))
        entry["load"].append(round(os.getloadavg()[0], 1))
        entry.update(skipped=dict(skipped), date=now(), machine=machine(), versions=versions())
        self.write()

    def drop(self, key: str) -> None:
        self.rows.pop(key, None)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.rows, indent=1) + "\n")
        beside.replace(self.path)


def values(rounds: list[dict[str, Figures]], name: str, key: str) -> list[float]:
    """A contender's figure, a round each, where it has one."""
    found = (one.get(name, {}).get(key) for one in rounds)
    return [value for value in found if isinstance(value, (int, float))]


def ratios(rounds: list[dict[str, Figures]], name: str, base: str, key: str) -> list[float]:
    """A contender's figure in that of another, round by round: both ran under the same conditions."""
    pairs = ((one.get(name, {}).get(key), one.get(base, {}).get(key)) for one in rounds)
    return [a / b for a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float)) and b]


def spread(found: list[float], form: str) -> str:
    """The median, and from the least to the most."""
    if not found:
        return "-"
    middle, low, high = (form.format(value) for value in (median(found), min(found), max(found)))
    return middle if len(found) == 1 else f"{middle} ({low} to {high})"


def machine() -> dict[str, Any]:
    """Of which processor, how many of its cores and which instructions."""
    named, flags = platform.processor() or platform.machine(), []
    try:
        text = Path("/proc/cpuinfo").read_text()
        named = text.partition("model name\t: ")[2].partition("\n")[0] or named
        flags = [flag for flag in FLAGS if f" {flag}" in text]
    except OSError:
        pass
    return {"cpu": named, "instructions": flags, "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")}


def versions() -> dict[str, str]:
    """Of Python and of what is compared."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
