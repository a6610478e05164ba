"""Two runs side by side: which is faster and by how much, whether they are the same job, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.core.telemetry import pictures
from plugins.core.telemetry.html import Page
from plugins.core.telemetry.losses import LossFacts, finite, lowest
from plugins.core.telemetry.pictures import Picture, in_time
from plugins.core.telemetry.svg import Bar, Line, bars
from plugins.core.telemetry.tables import Table, show, words
from plugins.core.telemetry.verdict import Finding, Mark, Verdict
from plugins.errors import AccelError

LEVEL = 1.03  # times as fast: below it two runs are equally fast
MATCHING = {"model": "model", "parameters": "parameters", "device": "device"}  # of the report itself
FIGURES = (  # part, field; a ratio where both are numbers
    ("speed", "step_seconds_median"),
    ("speed", "samples_per_second"),
    ("speed", "loader_wait_fraction"),
    ("speed", "first_step_seconds"),
    ("memory", "first_step_peak_gib"),
    ("memory", "steady_peak_gib"),
    ("window", "updates"),
    ("window", "skipped_updates"),
    ("window", "effective_batch"),
    ("window", "accumulate"),
    ("compile", "graphs"),
    ("compile", "recompiles"),
    ("compile", "seconds"),
    ("shapes", "padding_fraction"),
    ("gradients", "norm_median"),
)
CHOSEN = (("speed", "plan"), ("compile", "decision"), ("window", "exact"), ("batchnorm", "rule"), ("ema", "decay"))


class NotComparable(AccelError):
    """Two runs of which no figure can be set against the other's."""


@dataclass(frozen=True)
class Comparison:
    """The verdict; figures as (name, A, B, B / A); what differs as (name, A, B); losses and speed as pictures."""

    verdict: Verdict
    figures: Table
    differences: Table
    pictures: Sequence[Picture]

    def page(self, names: tuple[str, str]) -> Page:
        """As a page; `names` are those of the two runs."""
        about = [f"A: {names[0]}", f"B: {names[1]}"]
        tables = [table for table in (self.figures, self.differences) if table.rows]
        return Page("accel report: two runs", about, self.verdict, pictures=self.pictures, open_tables=tables)


def compare(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """Set the data of two reports side by side.

    Raises:
        NotComparable: other hosts or schemas, or a run without a timed update.
    """
    _check(a, b)
    other = list(_other_job(a, b))
    figures = Table("figures", ("figure", "A", "B", "B / A"), list(_figures(a, b)))
    differences = Table("what differs", ("of", "A", "B"), list(_differences(a, b)))
    found = [*_jobs(a, b, other), *_exactness(a, b), *_waiting(a, b), *_memory(a, b), *_learnt(a, b)]
    verdict = Verdict(_headline(a, b, other), found, None)
    return Comparison(verdict, figures, differences, [*_times(a, b), *_losses(a, b)])


def _check(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in ("schema", "host"):
        if a[name] != b[name]:
            raise NotComparable(
                f"{name}: A has {show(a[name])} and B {show(b[name])}; only runs of one {name} can be compared"
            )
    for name, data in (("A", a), ("B", b)):
        if not _positive(data["speed"]["step_seconds_median"]):
            raise NotComparable(f"{name} has no timed update (speed.step_seconds_median); nothing to compare")


def _seconds(data: dict[str, Any]) -> float:
    """Of an update, with its share of what the run waited for data."""
    waits = data["speed"]["loader_wait_fraction"] or 0.0
    return float(data["speed"]["step_seconds_median"]) / (1 - min(max(waits, 0.0), 0.999))


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e15


def _other_job(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """In what the work itself differs, as far as both say it."""
    for field, name in MATCHING.items():
        if a[field] and b[field] and a[field] != b[field]:
            yield f"{name} {show(a[field])} against {show(b[field])}"
    sizes = [data["window"]["effective_batch"] for data in (a, b)]
    if sizes[0] != sizes[1]:
        yield f"effective batch {sizes[0]} against {sizes[1]}"
    shapes = [{tuple(shape[1:]) for shape in data["shapes"]["seen"]} for data in (a, b)]
    if all(shapes) and not shapes[0] & shapes[1]:
        yield "no input shape in common"


def _headline(a: dict[str, Any], b: dict[str, Any], other: list[str]) -> str:
    sizes = [data["window"]["effective_batch"] for data in (a, b)]
    ratio, unit = _seconds(a) / _seconds(b), "update"
    if sizes[0] != sizes[1] and all(map(_positive, sizes)):
        ratio, unit = ratio * sizes[1] / sizes[0], "sample"
    job = "another job" if other else "the same job"
    if 1 / LEVEL < ratio < LEVEL:
        return f"A and B are equally fast per {unit}, within {LEVEL - 1:.0%} ({job})"
    first, second, times = ("B", "A", ratio) if ratio > 1 else ("A", "B", 1 / ratio)
    return f"{first} is {times:.3g} times as fast as {second} per {unit} ({job})"


def _jobs(a: dict[str, Any], b: dict[str, Any], other: list[str]) -> Iterator[Finding]:
    if other:
        yield Finding(Mark.BAD, f"Not the same job: {'; '.join(other)}. Speeds are of different work.")
    else:
        equal = [name for field, name in MATCHING.items() if a[field] and b[field]]
        words = ", ".join([*equal, "effective batch"])
        yield Finding(Mark.GOOD, f"The same job, as far as both reports say ({words}).")


def _exactness(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Finding]:
    exact = [data["window"]["exact"] for data in (a, b)]
    if exact[0] != exact[1]:
        yield Finding(Mark.NOTE, f"Only {'A' if exact[0] else 'B'} has exactly the big batch's gradient.")


def _waiting(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Finding]:
    waits = [data["speed"]["loader_wait_fraction"] or 0.0 for data in (a, b)]
    if abs(waits[0] - waits[1]) > 0.05:
        words = f"Waiting for data, which is counted, took {show(waits[0])} of A's time and {show(waits[1])} of B's."
        yield Finding(Mark.NOTE, words)


def _memory(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Finding]:
    peaks = [data["memory"]["steady_peak_gib"] for data in (a, b)]
    if a["memory"]["kind"] == b["memory"]["kind"] and all(map(_positive, peaks)):
        yield Finding(Mark.NOTE, f"Peak memory {peaks[0]:.3g} GiB against {peaks[1]:.3g} GiB.")


def _learnt(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Finding]:
    best = [lowest(LossFacts(**data["losses"]).valid) for data in (a, b)]
    if best[0] is not None and best[1] is not None:
        yield Finding(Mark.NOTE, f"Lowest validation loss {best[0][1]:.4g} against {best[1][1]:.4g}.")


def _figures(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    pairs = [(words(part, field), a[part][field], b[part][field]) for part, field in FIGURES]
    pairs.insert(1, ("s an update, waiting for data included", _seconds(a), _seconds(b)))
    losses = [LossFacts(**data["losses"]) for data in (a, b)]
    for name, words_of in (("train", "training"), ("valid", "validation")):
        last_a, last_b = (next((y for _, y in reversed(finite(getattr(facts, name)))), None) for facts in losses)
        pairs.append((f"last {words_of} loss", last_a, last_b))
    same_memory = a["memory"]["kind"] == b["memory"]["kind"]
    for name, of_a, of_b in pairs:
        if of_a is None and of_b is None:
            continue
        comparable = _positive(of_a) and _positive(of_b) and (same_memory or "GiB" not in name)
        yield name, show(of_a), show(of_b), f"{of_b / of_a:.3g}" if comparable else "-"


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for field, name in MATCHING.items():
        if a[field] != b[field]:
            yield name, show(a[field]), show(b[field])
    for part, field in CHOSEN:
        if a[part][field] != b[part][field]:
            yield f"{part}: {words(part, field)}", show(a[part][field]), show(b[part][field])
    for part, title in (("config", "setting"), ("versions", "version")):
        for field in sorted({*a[part], *b[part]}):
            here, there = a[part].get(field), b[part].get(field)
            if here != there:
                yield show(f"{title}: {field}"), show(here), show(there)


def _times(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Picture]:
    seconds = [_seconds(data) for data in (a, b)]
    rows = [
        Bar(f"{name}: {show(data['speed']['plan'])}", own, in_time(own), kind)
        for name, data, own, kind in zip("AB", (a, b), seconds, ("rest", "one"), strict=True)
    ]
    told = "; ".join(f"{row.name} {row.label}" for row in rows)
    yield Picture(
        "Time of an update", bars(f"Time of an update: {told}", rows), "Waiting for data included; shorter is faster."
    )


def _losses(a: dict[str, Any], b: dict[str, Any]) -> list[Picture]:
    """In one picture where they count the same unit."""
    both = [LossFacts(**data["losses"]) for data in (a, b)]
    if both[0].unit != both[1].unit and all(facts.train or facts.valid for facts in both):
        return []
    kinds = (("A, training", "four"), ("A, validation", "two"), ("B, training", "three"), ("B, validation", "one"))
    curves = [points for facts in both for points in (facts.train, facts.valid)]
    lines = [Line(*kind, finite(curve), "valid" in kind[0]) for kind, curve in zip(kinds, curves, strict=True)]
    unit = next((facts.unit for facts in both if facts.train or facts.valid), "update")
    return pictures.losses([line for line in lines if line.points], unit, "")
