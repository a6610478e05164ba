"""A run's pictures: losses, the plans that were tried, memory against its limit, and the run update by update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from plugins.core.telemetry.losses import LARGEST, LossFacts, finite, lowest, sentence
from plugins.core.telemetry.series import Series
from plugins.core.telemetry.svg import POINTS, Bar, Line, bars, plot

MOST_BARS, MOST_DOTS = 12, 60
SECONDS = "seconds an update"
LOG_ABOVE = 30.0  # largest loss / smallest, from which on the axis is logarithmic


@dataclass(frozen=True)
class Picture:
    """A drawing under a title, with a sentence below it and a legend of (class, words)."""

    title: str
    drawing: Markup
    words: str = ""
    legend: tuple[tuple[str, str], ...] = ()


def of_losses(facts: LossFacts) -> list[Picture]:
    """Training and validation loss in one picture; none where the host told no loss."""
    lines = [Line("training", "two", finite(facts.train)), Line("validation", "one", finite(facts.valid), dots=True)]
    return losses([line for line in lines if line.points], facts.unit, sentence(facts), lowest(facts.valid))


def losses(lines: Sequence[Line], unit: str, words: str, best: tuple[float, float] | None = None) -> list[Picture]:
    """Curves of losses under one another's names; `best` is marked."""
    values = [y for line in lines for _, y in line.points]
    if not values:
        return []
    shown = [replace(line, dots=line.dots and len(line.points) <= MOST_DOTS) for line in lines]
    log = min(values) > 0 and max(values) / min(values) > LOG_ABOVE
    legend, marks = [(line.kind, line.name) for line in lines], []
    if best is not None:
        legend.append(("best", f"lowest validation: {best[1]:.4g}"))
        marks.append((best[0], "best"))
    told = "; ".join(f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in lines)
    drawing = plot(f"Loss over {unit}s: {told}. {words}", shown, 220, log, marks=marks, across=unit)
    return [Picture("Loss", drawing, words, tuple(legend))]


def of_candidates(speed: dict[str, Any]) -> list[Picture]:
    """Seconds a step of every plan that was tried; none where none was."""
    timed = [(c, seconds) for c in speed["candidates"] if (seconds := _length(c.get("step_seconds_median")))]
    if not timed:
        return []
    rows = []
    for candidate, seconds in timed[:MOST_BARS]:
        name = str(candidate.get("plan", "-"))
        spread = min(_length(candidate.get("spread_seconds")) or 0.0, seconds)
        rows.append(Bar(name, seconds, in_time(seconds), "one" if name == speed["plan"] else "rest", spread))
    told = "; ".join(f"{row.name} {row.label}" for row in rows)
    more = f" {len(timed) - MOST_BARS} more are in the table." if len(timed) > MOST_BARS else ""
    words = (
        f"Forward and backward of a micro-batch, timed in turn on a batch of this run; in force: {speed['plan']}.{more}"
    )
    return [Picture("Plans that were tried", bars(f"Time of a step by plan: {told}", rows), words)]


def of_memory(memory: dict[str, Any]) -> list[Picture]:
    """Peaks against the limit; none where nothing was measured."""
    peaks = [("at the first update", memory["first_step_peak_gib"]), ("later", memory["steady_peak_gib"])]
    rows = [Bar(name, size, f"{size:.3g} GiB") for name, peak in peaks if (size := _length(peak))]
    if not rows:
        return []
    limit, most = _length(memory.get("limit_gib")), max(row.length for row in rows)
    resident = memory["kind"] == "rss"
    of = "the process's resident memory" if resident else f"tensors in the device's memory ({memory['kind']})"
    words = f"Peak of {of}" + (f": {most / limit:.0%} of the {limit:.3g} GiB that there are." if limit else ".")
    told = "; ".join(f"{row.name} {row.label}" for row in rows)
    drawing = bars(f"{words} {told}", rows, (limit, f"limit {limit:.3g} GiB") if limit else None)
    return [Picture("Memory", drawing, words)]


def of_updates(series: Series | None) -> list[Picture]:
    """Time, gradient norm, waiting, memory and padding over updates; compiles and changes of plan are marked."""
    if series is None or len(series.seconds) < 2:
        return []
    waits = [w / (w + own) if w + own else 0.0 for w, own in zip(series.waits, series.seconds, strict=False)]
    panels: list[tuple[str, Sequence[float], float | None, float | None]] = [  # with the lowest and highest value shown
        (SECONDS, series.seconds, None, None),
        ("gradient norm, before clipping", series.norms, 0.0, None),
        ("share of the time that waits for data", waits, 0.0, 1.0),
        ("GiB in use", series.memory, 0.0, None),
        ("share of padding", series.padding if any(series.padding) else (), 0.0, 1.0),
    ]
    happened = (("compiled", "compiled", series.compiled_at), ("switched", "another plan", series.switched_at))
    marks = [(float(at), kind) for kind, _, updates in happened for at in updates if at < len(series.seconds)]
    legend = tuple((kind, words) for kind, words, updates in happened if updates)
    found: list[Picture] = []
    for title, values, floor, top in panels:
        if points := thinned(values):
            label = f"{title}, from {points[0][1]:.4g} to {points[-1][1]:.4g}"
            log = title is SECONDS and all(y > 0 for _, y in points)
            drawing = plot(label, [Line(title, "one", points)], 84, log, floor, top, marks, "update")
            found.append(Picture(title, drawing, legend=() if found else legend))
    return found


def thinned(values: Sequence[float]) -> list[tuple[float, float]]:
    """(update, value), of long runs the means of neighbours that leave `POINTS`; what is not finite is left out."""
    width = -(-len(values) // POINTS) or 1
    parts = ((at, [v for v in values[at : at + width] if abs(v) < LARGEST]) for at in range(0, len(values), width))
    return [(float(at), sum(part) / len(part)) for at, part in parts if part]


def in_time(seconds: float) -> str:
    """A time in the unit that suits it."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _length(value: Any) -> float | None:
    """What a bar can be as long as, or None: reports may come from anywhere."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15
    return float(value) if usable else None
