"""`accel report`: what one run did, or two side by side, in words and figures; also as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from plugins.errors import AccelError

if TYPE_CHECKING:
    from plugins.core.telemetry.tables import Table as Figures

SHOWN = ("window", "compile", "speed", "memory", "gradients", "batchnorm", "ema")
WARNINGS = 100
MARKS = {"good": "green", "note": "", "bad": "red"}


def report(runs: Sequence[Path], html: Path | None, console: Console) -> None:
    """Print one run, or compare two.

    Args:
        runs: one or two folders of runs, or their accel_report.json.
        html: where the page is to be written too, a name that ends in .html.
        console: to print on.

    Raises:
        AccelError: what cannot be read, compared or written, in one line; nothing is written then.
    """
    if len(runs) > 2:
        raise AccelError(f"report: {len(runs)} runs given; expected one, or two to compare")
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise AccelError(f"html={html}: expected a name that ends in .html")
    found = [_read(run) for run in runs]
    page = _show(found[0], console) if len(found) == 1 else _compare(runs, found, console)
    if html is not None:
        _write(html, page())
        console.print(f"page: {html}")


def _read(run: Path) -> dict[str, Any]:
    from pydantic import TypeAdapter, ValidationError

    from plugins.core.autotune.json_record import one_line, read_bounded
    from plugins.core.telemetry.report import JSON_NAME, Report

    path = _file(run)
    if not path.is_file():
        raise AccelError(f"run={run}: no {JSON_NAME} there; expected a run's folder or that file")
    try:
        return TypeAdapter(Report).validate_json(read_bounded(path)).data()
    except OSError as error:
        raise AccelError(f"run={path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise AccelError(f"run={path}: not an accel report: {one_line(error)}") from None
    except ValueError as error:  # not a pydantic one: larger than any that is written here
        raise AccelError(f"run={path}: not an accel report: {error}") from None


def _file(run: Path) -> Path:
    from plugins.core.telemetry.report import JSON_NAME

    return run / JSON_NAME if run.is_dir() else run


def _show(data: dict[str, Any], console: Console) -> Callable[[], str]:
    from plugins.core.telemetry.html import render
    from plugins.core.telemetry.tables import candidates, show
    from plugins.core.telemetry.verdict import verdict

    _verdict(verdict(data), console)
    for warning in data["warnings"][:WARNINGS]:
        console.print(f"warning {show(warning)}", style="yellow")
    if len(data["warnings"]) > WARNINGS:
        console.print(f"... {len(data['warnings'])} warnings in all", style="yellow")
    table = Table("part", "field", "value")
    for part in SHOWN:
        for name, value in data[part].items():
            if name != "candidates":
                table.add_row(part, name, show(value))
    console.print(table)
    if (tried := candidates(data["speed"]["candidates"])).rows:
        console.print(_table(tried))
    return lambda: render(data)


def _compare(runs: Sequence[Path], found: Sequence[dict[str, Any]], console: Console) -> Callable[[], str]:
    from plugins.core.telemetry.comparison import compare

    first, second = (_file(run) for run in runs)
    if first.samefile(second):
        raise AccelError(f"report: {runs[0]} and {runs[1]} are one run; nothing to compare")
    names = (str(runs[0]), str(runs[1]))
    compared = compare(*found)
    _verdict(compared.verdict, console)
    for letter, name in zip("AB", names, strict=True):
        console.print(f"{letter}: {name}")
    for table in (compared.figures, compared.differences):
        if table.rows:
            console.print(_table(table))
    return lambda: compared.page(names).html


def _verdict(verdict: Any, console: Console) -> None:
    console.print(verdict.headline, style="bold")
    for finding in verdict.findings:
        console.print(f"{finding.mark.value:>4}  {finding.words}", style=MARKS[finding.mark.value])
    for words in verdict.advice or []:
        console.print(f"next  {words}", style="bold")


def _table(figures: Figures) -> Table:
    table = Table(*figures.heads, title=figures.title)
    for row in figures.rows:
        table.add_row(*row)
    return table


def _write(path: Path, page: str) -> None:
    from plugins.core.checkpoint.atomic_file import write_atomically

    try:
        write_atomically(path, lambda file: file.write(page.encode("utf-8")))
    except OSError as error:
        raise AccelError(f"html={path}: {error.strerror or error}") from None
