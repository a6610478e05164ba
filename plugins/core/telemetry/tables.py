"""A report's figures as tables that a person reads: fields in words, values as short as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ITEMS = 50  # of a list that are shown; the JSON has all
LONGEST = 2000  # characters of one value
ROWS = 200  # of one table

WORDS = {
    "accumulate": "micro-batches an update",
    "micro_batch": "samples a micro-batch",
    "effective_batch": "samples an update",
    "micro_batches": "micro-batches in all",
    "partial_windows": "updates of fewer micro-batches (tails)",
    "skipped_updates": "updates skipped (gradient not finite)",
    "dropped_micro_batches": "micro-batches dropped",
    "exact": "gradient exactly that of the big batch",
    "approximate_terms": "what is not exact",
    "graphs": "graphs compiled",
    "phases": "graphs by phase",
    "marking": "how varying sizes were marked",
    "budget": "graphs allowed",
    "seconds": "s spent compiling",
    "cache": "compile cache",
    "break_even_update": "update at which compile has paid for itself",
    "switches": "changes of plan",
    "first_step_seconds": "s of the first update",
    "step_seconds_median": "s an update (median)",
    "samples_per_second": "samples a second",
    "loader_wait_fraction": "share of the time spent waiting for data",
    "kind": "what is measured",
    "first_step_peak_gib": "GiB at the first update's peak",
    "steady_peak_gib": "GiB at the peak of later updates",
    "out_of_memory": "out of memory",
    "limit_gib": "GiB that there are",
    "seen": "input shapes seen",
    "buckets": "bucket edges",
    "padding_fraction": "share of padding",
    "norm_median": "gradient norm (median, before clipping)",
    "clip_norm": "clipped at norm",
    "clipped_fraction": "share of updates that were clipped",
    "without_gradient": "parameters without a gradient",
    "layers": "BatchNorm layers",
    "micro_batch_too_small": "micro-batch too small for its statistics",
}
PARTS = ("window", "compile", "speed", "memory", "shapes", "gradients", "batchnorm", "ema", "config", "versions")
APART = ("candidates",)  # which have a table of their own
CANDIDATE = {
    "plan": "plan",
    "step_seconds_median": "s a step",
    "spread_seconds": "spread",
    "first_step_seconds": "first step, s",
    "loss": "loss on the same batch",
}


@dataclass(frozen=True)
class Table:
    """Rows under heads; the first cell of a row is its name."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def of_run(data: dict[str, Any]) -> list[Table]:
    """Every table of a run's report, those with nothing to show left out."""
    tables = [Table(part, ("field", "value"), _rows(part, data[part])) for part in PARTS]
    saved = [(str(at), show(path)) for at, path in enumerate(data["checkpoints"][-ROWS:], 1)]
    found = [candidates(data["speed"]["candidates"]), *tables, Table("checkpoints", ("number", "file"), saved)]
    return [table for table in found if table.rows]


def candidates(tried: list[dict[str, Any]]) -> Table:
    """The plans that were tried."""
    rows = [[show(one.get(name)) for name in CANDIDATE] for one in tried[:ROWS]]
    return Table("plans that were tried", tuple(CANDIDATE.values()), rows)


def words(part: str, field: str) -> str:
    """Settings are shown by the names that they are set by, everything else in words."""
    return field if part in ("config", "versions") else WORDS.get(field, field.replace("_", " "))


def show(value: Any) -> str:
    """A value as short as it can be; long lists and texts are cut, and say so."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return _cut([str(item) for item in value[:ITEMS]], len(value))
    if isinstance(value, dict):
        return _cut([f"{k}: {v}" for k, v in list(value.items())[:ITEMS]], len(value))
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def _cut(items: list[str], count: int) -> str:
    more = [f"… ({count:,} in all)"] if count > len(items) else []
    return show(", ".join([*items, *more])) if items else "-"


def _rows(part: str, fields: dict[str, Any]) -> list[tuple[str, str]]:
    shown = [(name, value) for name, value in fields.items() if name not in APART]
    return [(show(words(part, name)), show(value)) for name, value in shown[:ROWS]]
