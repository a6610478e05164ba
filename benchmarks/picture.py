"""Draws docs/figures.svg from the table of the speed plan in BENCHMARKS.md: whole runs with the plug / without it.

python benchmarks/picture.py
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "figures.svg"
UPDATES = "1,000"  # rows of this length
LEFT, SCALE, HIGH, GAP = 340, 380, 22, 12  # px: the names, a ratio of 1, a bar, between bars


def ratios(text: str) -> list[tuple[str, float]]:
    """(workload, time with the plug / without) of the first runs of 1,000 updates."""
    table = text[text.index("## The speed plan") :]
    found, name = [], ""
    for row in re.findall(r"^\| (.*) \|$", table, re.M):
        cells = [cell.strip() for cell in row.split("|")]
        name = cells[0].replace("`", "") or name
        if len(cells) == 7 and cells[1] == UPDATES:
            found.append((name, float(cells[3])))
    return found


def draw(rows: list[tuple[str, float]]) -> str:
    """Horizontal bars; the line is a run without the plug."""
    height = len(rows) * (HIGH + GAP) + 40
    one = LEFT + SCALE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {one + 60} {height}" font-family="sans-serif" '
        'font-size="14" role="img">',
        f"<title>Time of {UPDATES} updates with the plug, as a share of the time without it</title>",
        f'<rect width="{one + 60}" height="{height}" fill="#ffffff"/>',
    ]
    for at, (name, ratio) in enumerate(rows):
        top = at * (HIGH + GAP) + GAP
        middle, width = top + HIGH - 6, round(ratio * SCALE)
        lines += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" fill="#222222">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{width}" height="{HIGH}" fill="#3f6fb5"/>',
            f'<text x="{LEFT + width - 34}" y="{middle}" fill="#ffffff">{ratio:.2f}</text>',
        ]
    lines += [
        f'<line x1="{one}" y1="4" x2="{one}" y2="{height - 28}" stroke="#222222" stroke-dasharray="4 3"/>',
        f'<text x="{one}" y="{height - 10}" text-anchor="middle" fill="#222222">without the plug: 1</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def picture() -> str:
    """The picture of the figures as BENCHMARKS.md has them now."""
    return draw(ratios((ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")))


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)
