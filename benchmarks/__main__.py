"""The benchmarks: ratios of things run in turn, into one file of results and the tables of BENCHMARKS.md.

    python -m benchmarks                     # every row that is not in the file yet; about an hour on two cores
    python -m benchmarks yolo limit-yolo     # some of them
    python -m benchmarks --again yolo        # anew
    python -m benchmarks --list

Stopped and started again, it goes on with the round that it was in.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks import picture  # noqa: E402
from benchmarks.harness import Figures, Row, run_row  # noqa: E402
from benchmarks.registry import SECTIONS, rows  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from benchmarks.tables import written  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results.json", ROOT / "BENCHMARKS.md"
SCRATCH = ROOT / ".cache" / "benchmarks"


def run(row: Row, results: Results, quick: bool) -> None:
    """The rounds of a row that the file does not have."""
    skipped = results.skipped(row.key)
    first, began = len(results.rounds(row.key)), time.monotonic()

    def done(number: int, found: Mapping[str, Figures]) -> None:
        results.add(row, quick, found, skipped)
        told = ", ".join(f"{name} {one.get('seconds', 0):.3g}" for name, one in found.items())
        print(f"{row.key} {number + 1}: {told}  [{time.monotonic() - began:.0f} s]", flush=True)

    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH, ignore_cleanup_errors=True) as folder:
        run_row(row, first, quick, Path(folder), skipped, done)
    for name, why in skipped.items():
        print(f"{row.key}: {name}: not run: {why}", flush=True)


def write(results: Results, page: Path) -> None:
    """The tables, and the picture of their ratios."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    page.write_text(written(text, SECTIONS, results), encoding="utf-8")
    if page == PAGE:
        picture.write_ratios(results)


def main() -> int:
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--again", action="append", default=[], metavar="ROW", help="forget this row's results first")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it run?")
    parser.add_argument("--contenders", type=int, metavar="N", help="only the first N of each row")
    parser.add_argument("--rounds", type=int, metavar="N", help="until a row has N; a later run goes on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--tables", action="store_true", help="only write the tables and the picture")
    parser.add_argument("--list", action="store_true", help="the rows")
    given = parser.parse_args()
    if unknown := {*given.rows, *given.again} - known.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such row; there are {', '.join(known)}")
    if given.quick and given.results == RESULTS:
        parser.error("--quick: its figures are no results; give --results and --page of your own")
    results = Results(given.results)
    if given.list:
        for row in known.values():
            print(f"{row.key:24} {len(results.rounds(row.key))} of {row.rounds}  {row.what}")
        return 0
    for key in given.again:
        results.drop(key)
    os.environ.setdefault("YOLO_CONFIG_DIR", str(ROOT / ".cache" / "ultralytics"))
    Path(os.environ["YOLO_CONFIG_DIR"]).mkdir(parents=True, exist_ok=True)
    for key in [] if given.tables else dict.fromkeys([*given.rows, *given.again]) or known:
        row = known[key]
        rounds = min(row.rounds, given.rounds or row.rounds)
        run(replace(row, contenders=row.contenders[: given.contenders], rounds=rounds), results, given.quick)
        write(results, given.page)
    write(results, given.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
