"""Pictures as inline SVG that needs no script: lines over a run, and bars.

Lengths across are shares of the width, so that a picture fits a narrow screen while its words keep their size. Colours
are classes of `page.css`, in light and dark. Words from outside are escaped by `Markup.format`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

POINTS = 500  # of a line
WIDE = 1000  # units across a plot
LONGEST = 80  # % of the width, of a bar; beside it stands its label


@dataclass(frozen=True)
class Line:
    """One curve: its name, the class of its colour and dashes, and its points (x, y), all finite."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar: its name, length, what is written at its right end, and half the width of its whisker."""

    name: str
    length: float
    label: str
    kind: str = "one"
    spread: float = 0.0


def number(value: float) -> str:
    """Short, as an axis has it."""
    return f"{value:.4g}" if abs(value) < 1e5 or abs(value) >= 1e15 else f"{value:,.0f}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between the two, at most so many."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10, 20) if unit * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)][: most + 1]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten between the two, or their 1, 2 and 5 where they are close together."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= most:
            return found or ticks(low, high, most)
    return found[:: -(-len(found) // most)]


def plot(
    label: str,
    lines: Sequence[Line],
    height: int,
    log: bool = False,
    floor: float | None = None,
    top: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
    across: str = "",
) -> Markup:
    """Curves over one axis.

    Args:
        label: what a reader who cannot see it is told.
        lines: at least one point in all.
        height: of the plot, px.
        log: whether the axis upwards is logarithmic; all values are positive then.
        floor: the lowest value shown, where it is not the lowest of the lines; `top` the highest.
        top: see `floor`.
        marks: upright lines at (x, class).
        across: the name of the axis across; empty draws no numbers below.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    left, right = min(xs), max(xs)
    low, high = _range(min(ys) if floor is None else floor, max(ys) if top is None else top, log)
    raised = math.log10 if log else float

    def x_of(x: float) -> float:
        return (x - left) / (right - left) if right > left else 0.5

    def y_of(y: float) -> float:
        share = (raised(y) - raised(low)) / (raised(high) - raised(low))
        return round(height * (1 - min(max(share, 0.0), 1.0)), 1)

    below = 40 if across else 0
    parts = [Markup('<svg class="plot" role="img" aria-label="{}" height="{}">').format(label, height + below)]
    for value in (log_ticks if log else ticks)(low, high, 6 if height > 90 else 4 if log else 3):
        parts.append(
            Markup(
                '<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/><text x="-8" y="{0}" dy=".32em" '
                'text-anchor="end">{1}</text>'
            ).format(y_of(value), number(value))
        )
    for x, kind in marks:
        at = f"{100 * x_of(x):.2f}%"
        parts.append(Markup('<line class="mark {}" x1="{}" x2="{}" y1="0" y2="{}"/>').format(kind, at, at, height))
    parts.append(
        Markup('<svg x="0" y="0" width="100%" height="{0}" viewBox="0 0 {1} {0}" preserveAspectRatio="none">').format(
            height, WIDE
        )
    )
    for line in lines:
        path = " ".join(f"{WIDE * x_of(x):.0f},{y_of(y):g}" for x, y in line.points)
        parts.append(Markup('<polyline class="curve {}" points="{}"/>').format(line.kind, path))
    parts.append(Markup("</svg>"))
    for line in lines:
        if line.dots or len(line.points) == 1:
            for x, y in line.points:
                parts.append(
                    Markup('<circle class="{}" cx="{}%" cy="{}" r="3"/>').format(
                        line.kind, f"{100 * x_of(x):.2f}", y_of(y)
                    )
                )
    if across:
        parts.append(_across(left, right, x_of, height, across))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def bars(label: str, rows: Sequence[Bar], limit: tuple[float, str] | None = None) -> Markup:
    """Bars that begin at 0, their words above them; `limit` is a line across each at (length, its words).

    Args:
        label: what a reader who cannot see it is told.
        rows: lengths not negative.
        limit: drawn where it is given; bars are as long as their share of the longest, or of it.
    """
    high, gap = 14, 44  # px
    top = 22 if limit else 0
    most = max([row.length + row.spread for row in rows] + ([limit[0]] if limit else [])) or 1.0
    scale = LONGEST / most
    height = top + gap * len(rows)
    track = f"{LONGEST}%"
    parts = [Markup('<svg class="bars" role="img" aria-label="{}" height="{}">').format(label, height)]
    for at, row in enumerate(rows):
        y = top + at * gap + 16
        parts.append(
            Markup(
                '<text x="0" y="{0}">{1}</text><text class="value" x="{5}" dx="10" y="{2}">{3}</text>'
                '<rect class="track" x="0" y="{4}" width="{5}" height="{6}" rx="3"/>'
                '<rect class="{7}" x="0" y="{4}" width="{8}%" height="{6}" rx="3"/>'
            ).format(y, short(row.name), y + 19, row.label, y + 7, track, high, row.kind, f"{scale * row.length:.2f}")
        )
        if row.spread:
            ends = [f"{scale * max(row.length + side * row.spread, 0):.2f}%" for side in (-1, 1)]
            parts.append(Markup('<line class="whisker" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(*ends, y + 14))
        if limit:
            at_x = f"{scale * limit[0]:.2f}%"
            parts.append(
                Markup('<line class="limit" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(at_x, y + 4, y + 10 + high)
            )
    if limit:
        anchor = "end" if limit[0] > most / 2 else "start"
        parts.append(
            Markup('<text class="value" x="{}%" y="12" text-anchor="{}">{}</text>').format(
                f"{scale * limit[0]:.2f}", anchor, limit[1]
            )
        )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def short(text: str, most: int = 44) -> str:
    """A name that fits a narrow screen."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _range(low: float, high: float, log: bool) -> tuple[float, float]:
    """With room where all values are one."""
    if high > low:
        return low, high
    return (low / 2, high * 2) if log else (low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5))


def _across(left: float, right: float, x_of: Callable[[float], float], height: int, name: str) -> Markup:
    parts = []
    for value in ticks(left, right, 4):
        share = x_of(value)
        anchor = "start" if share < 0.04 else "end" if share > 0.96 else "middle"
        parts.append(
            Markup('<text x="{}%" y="{}" text-anchor="{}">{}</text>').format(
                f"{100 * share:.2f}", height + 17, anchor, number(value)
            )
        )
    parts.append(Markup('<text x="50%" y="{}" text-anchor="middle">{}</text>').format(height + 35, name))
    return Markup("").join(parts)
