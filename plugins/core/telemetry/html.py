"""The report as a page that a person reads: one sentence a finding, tables, pictures. No script, no network."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment

from plugins.core.telemetry.series import Series

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>accel report: {{ r.host }}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem} h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
table{border-collapse:collapse} td{padding:.15rem 1rem .15rem 0;vertical-align:top} td:first-child{color:#666}
.warn{background:#fff3cd;padding:.4rem .8rem;margin:.3rem 0;border-radius:.3rem} svg{max-width:100%;height:auto}
</style>
<h1>accel report: {{ r.host }}</h1>
<p>{{ summary }}</p>
{% for w in r.warnings %}<div class="warn">{{ w }}</div>{% endfor %}
{% for picture in pictures %}{{ picture|safe }}{% endfor %}
{% if r.speed.candidates %}<h2>plans that were tried</h2><table>
<tr><td>plan</td><td>s a step</td><td>spread</td><td>first step</td><td>loss on the same batch</td></tr>
{% for c in r.speed.candidates %}<tr><td>{{ c.plan }}</td>{% for name in columns %}<td>{{ show(c[name]) }}</td>
{% endfor %}</tr>{% endfor %}</table>{% endif %}
{% for title, rows in parts %}<h2>{{ title }}</h2><table>
{% for name, value in rows %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>{% endfor %}
</html>
"""
POINTS = 1000  # of a curve
_WORDS = {
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
_COLUMNS = ("step_seconds_median", "spread_seconds", "first_step_seconds", "loss")
_PARTS = (
    "window",
    "compile",
    "speed",
    "memory",
    "shapes",
    "gradients",
    "batchnorm",
    "ema",
    "config",
    "versions",
)


def render(data: dict[str, Any], series: Series | None = None) -> str:
    """Return the page of a report's data, with pictures where a run's series is given."""
    tables = ("candidates",)  # which the page shows apart
    parts = [(name, [(_words(name, k), _show(v)) for k, v in data[name].items() if k not in tables]) for name in _PARTS]
    parts.append(("checkpoints", [(str(i + 1), path) for i, path in enumerate(data["checkpoints"])]))
    template = Environment(autoescape=True).from_string(_PAGE)
    return template.render(
        r=data, parts=parts, summary=summary(data), pictures=_pictures(series), columns=_COLUMNS, show=_show
    )


def summary(data: dict[str, Any]) -> str:
    """One sentence a promise: what the run was, in words."""
    window, compile_, speed = data["window"], data["compile"], data["speed"]
    words = [
        f"{window['updates']} updates of {window['effective_batch']} samples "
        f"({window['accumulate']} x {window['micro_batch']}), "
        f"{'exactly the big batch' if window['exact'] else 'approximately the big batch'}."
    ]
    norm = data["batchnorm"]
    if norm["layers"] and norm["rule"] != "freeze" and window["accumulate"] > 1:
        words.append(f"BatchNorm aside: its {norm['layers']} layers see micro-batches of {window['micro_batch']}.")
    if window["approximate_terms"]:
        words.append(f"Approximate: {', '.join(window['approximate_terms'])}.")
    if window["skipped_updates"]:
        words.append(f"{window['skipped_updates']} updates skipped for a non-finite gradient.")
    words.append(f"Ran {compile_['decision']}: {compile_['reason']}." if compile_["reason"] else "")
    if speed["plan"] != "host":
        words.append(f"Plan: {speed['plan']} ({speed['reason']}).")
    if speed["step_seconds_median"]:
        words.append(f"{speed['step_seconds_median']:.3g} s an update.")
    return " ".join(word for word in words if word)


def _words(part: str, field: str) -> str:
    """Settings are shown by the names that they are set by, everything else in words."""
    return field if part in ("config", "versions") else _WORDS.get(field, field.replace("_", " "))


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items()) or "-"
    return str(value)


def _pictures(series: Series | None) -> list[str]:
    """Step time, norms, waiting, memory and padding over updates, as one SVG; compiles and switches are marked."""
    if series is None or len(series.seconds) < 2:
        return []
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError:  # every plug's extra brings it; a bare install may lack it
        return ["<p>pip install matplotlib, and later reports have pictures here</p>"]

    waits = [
        wait / (wait + own) if wait + own else 0.0 for wait, own in zip(series.waits, series.seconds, strict=False)
    ]
    panels: list[tuple[str, Sequence[float], str]]
    panels = [("s an update", series.seconds, "tab:blue"), ("gradient norm", series.norms, "tab:green")]
    panels += [("waiting for data", waits, "tab:orange"), ("GiB in use", series.memory, "tab:purple")]
    panels += [("padding", series.padding, "tab:brown")] if any(series.padding) else []
    panels = [panel for panel in panels if len(panel[1])]
    figure = Figure(figsize=(9, 1.7 * len(panels)), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (label, values, colour) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        axes.plot(*_thinned(values), linewidth=0.9, color=colour)
        axes.set_ylabel(label)
        for update in series.compiled_at:
            axes.axvline(update, color="tab:red", alpha=0.4, linewidth=0.8)
        for update in series.switched_at:
            axes.axvline(update, color="black", alpha=0.5, linewidth=0.8, linestyle="--")
        if label == "s an update":
            axes.set_yscale("log")
        elif values is waits or label == "padding":
            axes.set_ylim(0, 1)
    marks = [("red: compiled", series.compiled_at), ("dashed: another plan", series.switched_at)]
    axes.set_xlabel(", ".join(["update", *(words for words, at in marks if at)]))
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return [text[text.index("<svg") :]]


def _thinned(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Updates and values, of long runs the mean of as many neighbours as leave `POINTS`."""
    width = -(-len(values) // POINTS)
    starts = range(0, len(values), width)
    return list(starts), [sum(part) / len(part) for part in (values[at : at + width] for at in starts)]
