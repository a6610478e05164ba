"""Whole runs with the plug and without it, as ratios of their wall time: what the measured plan is worth.

    python benchmarks/plan.py                              # every row and length: hours on 2 cores
    python benchmarks/plan.py --rows blocks --lengths 30   # some of them
    python benchmarks/plan.py --rows yolo --lengths 50 200 --repeats 3
    python benchmarks/plan.py --ready                      # compiled blocks, from a cold and from a warm cache

Each side is a process of its own, the sides in turn; the median of the repeats counts. `first` is a run with an empty
cache folder, `again` the same job once more with what the first one learnt. The clock runs from the first batch to
the end of training; imports, data set and the report's page are apart. Without the plug every update costs the same:
where it is slow, it runs `--plain-updates` of them, and its time is scaled to the length; the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("YOLO_OFFLINE", "true")

import torch  # noqa: E402
from workloads import ROWS  # noqa: E402

HOSTS = ("yolo", "minilm", "ocr")
SHORT = ("blocks", "products", "products_auto")
LENGTHS = {**{key: [30, 1000] for key in SHORT}, **{key: [50, 200, 1000] for key in HOSTS}}  # updates
WANTED = {"blocks": 0.72, "yolo": 0.70, "minilm": 0.62, "ocr": 0.12}  # at 1,000 updates; else 1.02
PLAIN_UPDATES = {"minilm": 200, "ocr": 30}  # at most, without the plug


def side(row: str, plug: bool, updates: int, folder: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    line = [sys.executable, __file__, "--side", row, "on" if plug else "off", str(updates), str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(row: str, updates: int, repeats: int, plain: int) -> tuple[list[str], str]:
    """The table's row, and the reason for the compile's part of the plan. `plain`: updates without the plug."""
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "first": [], "again": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:  # a cold cache each time
            for key, plug, length in (("off", False, plain), ("first", True, updates), ("again", True, updates)):
                runs[key].append(found := side(row, plug, length, Path(name)))
                found["seconds"] *= updates / found.get("updates", length)
    seconds = {key: median(run["seconds"] for run in found) for key, found in runs.items()}
    last, again = runs["first"][-1], runs["again"][-1]
    at = ", ".join(str(switch["update"]) for switch in last["switches"]) or "-"
    wanted = WANTED.get(row, 1.02) if updates == 1000 else 1.02
    cells = [
        row,
        str(updates),
        f"{seconds['off']:.1f} s" + (f", from {plain} updates" if plain < updates else ""),
        *(f"{seconds[k] / seconds['off']:.3f}" for k in ("first", "again")),
    ]
    plans = last["plan"] if last["plan"] == again["plan"] else f"{last['plan']}; again: {again['plan']}"
    return [*cells, f"<= {wanted:.2f}", plans, at], f"{row}, {updates}: {last['why']}"


def ready(repeats: int) -> str:
    """Seconds until compiled blocks are ready, in a process with a cold cache and in the next one."""
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            cold.append(side("ready", True, 1, Path(name))["seconds"])
            warm.append(side("ready", True, 1, Path(name))["seconds"])
    first, second = median(cold), median(warm)
    return f"ready after {first:.1f} s cold, {second:.2f} s warm: {second / first:.3f} (wanted <= 0.15)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--lengths", nargs="+", type=int, help="updates; default: 30 and 1,000, or 50, 200 and 1,000")
    parser.add_argument("--plain-updates", type=int, help="at most, without the plug; default: minilm 200, ocr 30")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--ready", action="store_true", help="only the compile from a cold and a warm cache")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        row, plug, updates, folder = given.side
        print(json.dumps(ROWS[row](plug == "on", int(updates), Path(folder))))
        return 0
    if given.ready:
        print(ready(given.repeats))
        return 0
    from rich.console import Console
    from rich.table import Table

    table, why = Table("row", "updates", "plug off", "first", "again", "wanted", "plan", "switched at"), []
    for row in given.rows:
        for updates in given.lengths or LENGTHS[row]:
            most = given.plain_updates or PLAIN_UPDATES.get(row, updates)
            cells, reason = compare(row, updates, given.repeats, min(most, updates))
            table.add_row(*cells)
            why.append(reason)
            print(" | ".join(cells), file=sys.stderr, flush=True)
    console = Console()
    console.print(table)
    console.print("\n".join(why))
    console.print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
