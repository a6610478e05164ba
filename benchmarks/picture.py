"""Draws docs/figures.svg from the table of the speed plan in BENCHMARKS.md: whole runs with the plug / without it.

    python benchmarks/picture.py

And docs/ratios.svg from the results of `python -m benchmarks`, which calls this.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.registry import SECTIONS  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from benchmarks.results import ratios as ratios_of  # noqa: E402
from benchmarks.tables import WANTED_ROUNDS  # noqa: E402

RATIOS = ROOT / "docs" / "ratios.svg"
PICTURE = ROOT / "docs" / "figures.svg"
UPDATES = "1,000"  # rows of this length
WIDE, LEFT, SCALE, HIGH, GAP = 860, 356, 430, 20, 14  # px: all, the names, a ratio of 1, a bar, between bars
TOP = 52  # px: the title
BACK, TRACK, BAR, INK = "#ffffff", "#eeeeeb", "#2462a8", "#1d2024"


def ratios(text: str) -> list[tuple[str, float]]:
    """(workload, time with the plug / without) of the first runs of 1,000 updates."""
    table = text[text.index("## The speed plan") :]
    found, name = [], ""
    for row in re.findall(r"^\| (.*) \|$", table, re.M):
        cells = [cell.strip() for cell in row.split("|")]
        name = cells[0] or name
        if len(cells) == 7 and cells[1] == UPDATES:
            found.append((in_words(name), float(cells[3])))
    return found


def in_words(name: str) -> str:
    """A row's name, as one reads it apart from the others: without the names of benchmarks, which are in brackets."""
    words = re.sub(r" \(`\w+`\)", "", name).replace("`", "")
    return re.sub(r"^and ", "the same with three Linears, ", words)


def draw(
    rows: list[tuple[str, float]],
    title: str = f"Time of {UPDATES} updates with the plug; a full track is the time without it",
    longest: float = 1.0,
    left: int = LEFT,
) -> str:
    """Horizontal bars on tracks that end where a run without the plug does; the same on light and dark pages.

    Args:
        rows: what ran, and its ratio.
        title: over the bars, and of the picture.
        longest: the ratio that fills the room there is for bars; tracks end at 1.
        left: px for the names.
    """
    height = TOP + len(rows) * (HIGH + GAP) + 12
    one, wide = SCALE / max(longest, 1.0), WIDE - LEFT + left
    told = escape("; ".join([title, *(f"{name} {ratio:.2f}" for name, ratio in rows)]))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" font-size="14" role="img" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" aria-label="{told}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{wide}" height="{height}" rx="8" fill="{BACK}"/>',
        f'<text x="20" y="30" font-weight="600" fill="{INK}">{escape(title)}</text>',
    ]
    for at, (name, ratio) in enumerate(rows):
        top = TOP + at * (HIGH + GAP)
        middle = top + HIGH - 5
        lines += [
            f'<text x="{left - 12}" y="{middle}" text-anchor="end" fill="{INK}">{escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{round(one)}" height="{HIGH}" rx="3" fill="{TRACK}"/>',
            f'<rect x="{left}" y="{top}" width="{round(ratio * one)}" height="{HIGH}" rx="3" fill="{BAR}"/>',
            f'<text x="{left + SCALE + 14}" y="{middle}" font-weight="600" fill="{INK}">{ratio:.2f}</text>',
        ]
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def drawn_ratios(results: Results) -> str:
    """Time a sample of the plug and of what one would pick instead, rows of five rounds: median ratios to the host."""
    found = []
    for section in SECTIONS:
        for row in section.rows if section.key == "throughput" else ():
            base, *others = (one.name for one in row.contenders)
            for name in others:
                each = ratios_of(results.rounds(row.key), name, base, "cpu")
                if len(each) >= WANTED_ROUNDS:
                    found.append((f"{row.key}: {name}", median(each)))
    longest = max((ratio for _, ratio in found), default=1.0)
    return draw(found, "CPU time a sample; a full track is that of the row's first contender", longest, left=470)


def write_ratios(results: Results) -> None:
    """Draw docs/ratios.svg anew."""
    RATIOS.write_text(drawn_ratios(results), encoding="utf-8")


def picture() -> str:
    """The picture of the figures as BENCHMARKS.md has them now."""
    return draw(ratios((ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")))


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)
