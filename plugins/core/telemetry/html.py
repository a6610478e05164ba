"""The report as a page that a person reads: the verdict, pictures, folded tables. No script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from plugins.core.telemetry import pictures, tables
from plugins.core.telemetry.losses import LossFacts, lowest
from plugins.core.telemetry.pictures import Picture, in_time
from plugins.core.telemetry.series import Series
from plugins.core.telemetry.svg import number
from plugins.core.telemetry.tables import Table
from plugins.core.telemetry.verdict import Verdict, faster, verdict

FOLDER = Path(__file__).parent
WARNINGS = 100  # shown; the JSON has all


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom.

    Attributes:
        title: of the browser's tab.
        about: a few words each on what was run.
        verdict: see there.
        figures: (value, what it is) of the run.
        warnings: each a line.
        pictures: shown at once.
        folded: pictures behind a click, under one title.
        tables: behind a click each, unless they are `open_tables`.
        open_tables: shown at once.
    """

    title: str
    about: Sequence[str]
    verdict: Verdict
    figures: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    folded: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    open_tables: Sequence[Table] = field(default=())

    @property
    def html(self) -> str:
        """The page's text; what is no Unicode text in it (file names) is shown by its code."""
        text = _template().render(page=self, style=_style(), show=tables.show, most=WARNINGS)
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def render(data: dict[str, Any], series: Series | None = None) -> str:
    """Return the page of a report's data, with the run update by update where its series is given."""
    losses = LossFacts(**data["losses"])
    drawn = [*pictures.of_losses(losses), *pictures.of_candidates(data["speed"]), *pictures.of_memory(data["memory"])]
    return Page(
        title=f"accel report: {data['host']}",
        about=_about(data),
        verdict=verdict(data),
        figures=_figures(data, losses),
        warnings=data["warnings"],
        pictures=drawn,
        folded=pictures.of_updates(series),
        tables=tables.of_run(data),
    ).html


def _about(data: dict[str, Any]) -> list[str]:
    size = f"{data['parameters'] / 1e6:.3g} M parameters" if data["parameters"] else ""
    return [str(words) for words in (data["host"], data["model"], size, data["device"]) if words]


def _figures(data: dict[str, Any], losses: LossFacts) -> list[tuple[str, str]]:
    speed, window, memory = data["speed"], data["window"], data["memory"]
    ratio, best = faster(speed), lowest(losses.valid)
    peak = memory["steady_peak_gib"] or memory["first_step_peak_gib"]
    found = [
        (f"{ratio:.2f}x" if ratio else "", "the plain plan's speed"),
        (in_time(speed["step_seconds_median"]) if speed["step_seconds_median"] else "", "an update"),
        (number(speed["samples_per_second"]) if speed["samples_per_second"] else "", "samples a second"),
        (f"{window['updates']:,}", "updates"),
        (f"{window['effective_batch']:,}", "samples an update"),
        (f"{peak:.3g} GiB" if peak else "", "peak memory"),
        (f"{best[1]:.4g}" if best else "", "lowest validation loss"),
    ]
    return [(tables.show(value), words) for value, words in found if value]


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    return environment.get_template("page.html")


@cache
def _style() -> Markup:
    return Markup((FOLDER / "page.css").read_text(encoding="utf-8"))  # our own file: nothing of a run is in it
