"""Does `accel find-batch` come near the true limit? The three demos, against a bisection that measures everything.

python benchmarks/find_batch.py [yolo hf easyocr] [--over 1.5]

For each demo a limit is set, a factor above the peak of micro-batch 2. From the search's answer on, a bisection
without any forecast or margin looks for the largest micro-batch whose trial stays within the limit. It begins with what
went over in the search, measured again: batches differ in their lengths, so that a larger one may need less. A row a
demo: the answer, the true limit, their ratio, and how many trials each took.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from plugins.find_batch.search import Measurement, Search  # noqa: E402
from plugins.find_batch.trials import Trials  # noqa: E402

MOST = 512


def yolo(folder: Path) -> list[str]:
    import shapes

    data = shapes.write(folder / "shapes", train=512, val=8)
    short = "imgsz=160 epochs=6 workers=0 val=False plots=False device=cpu optimizer=AdamW"
    return ["yolo", "train", "model=yolov8n.yaml", f"data={data}", *short.split()]


def hf(folder: Path) -> list[str]:
    return ["python", str(ROOT / "examples" / "hf_text_accel.py"), "--output", str(folder / "hf")]


def easyocr(folder: Path) -> list[str]:
    from easyocr_finetune import HARD, OTHERS, render

    render(folder / "train", [HARD, HARD, *OTHERS], 2000, seed=1)
    render(folder / "valid", [HARD], 8, seed=2)
    config = (ROOT / "examples" / "easyocr_en.yaml").read_text(encoding="utf-8")
    for part in ("train", "valid"):
        config = config.replace(f"demo/easyocr/lines/{part}", str(folder / part))
    (folder / "lines.yaml").write_text(config, encoding="utf-8")
    return ["accel", "fit", str(folder / "lines.yaml"), "valInterval=60"]


DEMOS: dict[str, Callable[[Path], list[str]]] = {"yolo": yolo, "hf": hf, "easyocr": easyocr}


def bisected(measure: Callable[[int], Measurement], limit: float, fits: int, first: int) -> tuple[int, int]:
    """(the largest micro-batch whose trial stays within the limit, trials).

    Args:
        measure: one trial.
        limit: GiB.
        fits: a micro-batch that is known to fit.
        first: a larger one to begin with.
    """
    low, high, count, size = fits, MOST + 1, 0, first
    while high - low > 1:
        count += 1
        if measure(size).fits(limit):
            low = size
        else:
            high = size
        size = min(2 * low, MOST) if high > MOST else (low + high) // 2
    return low, count


def compare(name: str, over: float) -> str:
    """One row."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        trials = Trials(DEMOS[name](folder), folder, None, 64.0, say=lambda text: print(f"  {text}", flush=True))
        first = trials.measure(2).peak_gib
        assert first is not None
        trials.limit_gib = limit = first * over
        search = Search(range(1, MOST + 1), limit, exact=False)
        best = search.run(trials.measure)
        print(*search.measured, sep="\n", flush=True)
        found = best.micro_batch if best else 0
        over = [one.micro_batch for one in search.measured if one.micro_batch > found]
        true, count = bisected(trials.measure, limit, found, min(over, default=found + max(found // 8, 1)))
    return (
        f"{name:8} limit {limit:.2f} GiB: found {found}, true {true}, ratio {found / true if true else 1:.2f}; "
        f"{len(search.measured)} trials, {count} more to be sure"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demos", nargs="*", default=list(DEMOS), metavar="DEMO", help=", ".join(DEMOS))
    parser.add_argument("--over", type=float, default=1.5, help="the limit, as a multiple of the peak at micro-batch 2")
    given = parser.parse_args()
    rows = [compare(name, given.over) for name in given.demos]
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
