"""`accel preflight -- COMMAND`: runs the trials, prints the table; its exit code says whether a verdict fails."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plugins.errors import AccelError
from plugins.preflight.checks import CHECKS
from plugins.preflight.picture import draw
from plugins.preflight.trials import Job, Trials, why_not
from plugins.preflight.verdict import Finding, Verdict

MOST = 50  # updates
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)  # times the job's own
BAD_INPUT = 2
STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}


def preflight(
    command: Annotated[list[str] | None, typer.Argument(help="The training, as you would start it; after --.")] = None,
    updates: Annotated[int, typer.Option(help=f"Of the first trial; 1 to {MOST}.")] = MOST,
    batch: Annotated[int | None, typer.Option(help="A micro-batch whose memory is to be forecast.")] = None,
    lr_scan: Annotated[bool, typer.Option("--lr-scan", help="Try learning rates from a tenth to ten times.")] = False,
    picture: Annotated[Path, typer.Option(help="Where the scan is drawn.")] = Path("lr_scan.png"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the verdicts go as JSON.")] = None,
    keep: Annotated[Path | None, typer.Option(help="A folder for what the trials leave; else it is removed.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each trial may take.")] = 600.0,
) -> None:
    """Try a training for a few updates, and say what would go wrong in the long run."""
    with _one_line():
        found = look(command or [], updates, batch, RATES if lr_scan else (), picture, json_file, keep, timeout)
    if any(one.verdict is Verdict.FAIL for one in found):
        raise typer.Exit(1)


def look(
    command: list[str],
    updates: int,
    batch: int | None,
    rates: tuple[float, ...],
    picture: Path,
    json_file: Path | None,
    keep: Path | None,
    timeout: float,
) -> list[Finding]:
    """All verdicts on a command, printed and written.

    Raises:
        AccelError: a bad limit, or a command of which no update could be made.
    """
    if not 1 <= updates <= MOST:
        raise AccelError(f"updates={updates}: allowed are 1 to {MOST}")
    if batch is not None and batch < 1:
        raise AccelError(f"batch={batch}: allowed are 1 and more")
    if not timeout > 0:
        raise AccelError(f"timeout={timeout:g}: allowed are seconds above 0")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise AccelError(f"json={json_file}: no such folder")
    console = Console(markup=False, emoji=False)
    with _folder(keep) as folder, console.status("starting") as status:
        job = Job(command, folder, updates, timeout, batch, rates, _told(status.update))
        trials = Trials(job)
        if why := why_not(trials.first):
            raise AccelError(f"command={' '.join(command)}: no update was made: {why}")
        found = [check(trials) for check in CHECKS if rates or check.__name__ != "scan"]
        if rates:
            draw(trials, picture)
    console.print(table(found))
    console.print(summary(found))
    if rates:
        console.print(f"learning rates: {picture}")
    if keep is not None:
        console.print(f"trials: {keep}")
    if json_file is not None:
        try:
            json_file.write_text(json.dumps([one.data() for one in found], indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise AccelError(f"json={json_file}: {error.strerror or error}") from None
    return found


def table(found: list[Finding]) -> Table:
    """A row a check."""
    made = Table("check", "verdict", "figure", "what to do")
    for one in found:
        made.add_row(one.check, Text(one.verdict.value, STYLES[one.verdict]), one.figure, one.advice)
    return made


def summary(found: list[Finding]) -> str:
    """How many of each."""
    many = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    words = {Verdict.PASS: "pass", Verdict.WARN: "to look at", Verdict.FAIL: "fail", Verdict.SKIP: "not measured"}
    return ", ".join(f"{many[verdict]} {word}" for verdict, word in words.items() if many[verdict])


def _told(show: Callable[[str], None]) -> Callable[[str, dict[str, Any]], None]:
    def told(name: str, line: dict[str, Any]) -> None:
        if "update" in line:
            loss = "-" if line["loss"] is None else f"{line['loss']:.4g}"
            show(f"{name}: update {line['update'] + 1}, loss {loss}")
        elif "begun" in line:
            show(f"{name}: begins")

    return told


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Of the trials: removed at the end, unless it is to be kept.

    Raises:
        AccelError: one to be kept that holds something already, or cannot be made.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="accel-preflight-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise AccelError(f"keep={keep}: is there already; give a new or an empty folder")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AccelError(f"keep={keep}: {error.strerror or error}") from None
    try:
        yield keep
    except AccelError:
        shutil.rmtree(keep, ignore_errors=True)
        raise


@contextmanager
def _one_line() -> Iterator[None]:
    """A user's mistake is one line and exit code 2, a Ctrl-C is quiet."""
    try:
        yield
    except AccelError as error:
        print(f"accel: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("accel: preflight was stopped", file=sys.stderr)
        raise typer.Exit(130) from None
