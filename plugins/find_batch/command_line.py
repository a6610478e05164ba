"""`accel find-batch`: what is asked for, what is measured, and what is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from plugins.errors import AccelError

if TYPE_CHECKING:
    from plugins.find_batch.advice import Advice
    from plugins.find_batch.finder import Found

MOST = 4096  # the largest micro-batch that is looked at where no effective batch bounds it
BAD_INPUT, NOTHING_FITS, INTERRUPTED = 2, 1, 130


def find_batch(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Your own: yolo train ..., python train.py, ...")
    ] = None,
    memory: Annotated[str, typer.Option(help="What the training may take: 7.5GiB, 8GB, or 80% of the machine's.")] = "",
    effective_batch: Annotated[
        str, typer.Option(help="Samples an update, kept exactly by accumulation; default: as the job has it.")
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Run the command that was found.")] = False,
    presets: Annotated[bool, typer.Option("--presets", help="Print starting points by a forecast, and stop.")] = False,
    updates: Annotated[int, typer.Option(min=2, help="Of each trial; more where samples differ much in size.")] = 4,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of each trial.")] = 600.0,
) -> None:
    """Find the largest micro-batch that fits into a memory size, by short trials of your own command."""
    try:
        code = _presets() if presets else _find(command or [], memory, effective_batch, updates, timeout, apply)
    except AccelError as error:
        print(f"accel: {error}", file=sys.stderr)
        code = BAD_INPUT
    raise typer.Exit(code)


def _presets() -> int:
    from plugins.find_batch import presets

    console = Console(markup=False, emoji=False)
    console.print(presets.table())
    console.print(presets.NOTE)
    return 0


def _find(command: list[str], memory: str, effective: str, updates: int, timeout: float, apply: bool) -> int:
    wanted = whole(effective) if effective else None
    if not memory:
        raise AccelError("--memory: none was given; expected a size such as 7.5GiB or 8GB, or a share such as 80%")
    from plugins.core.system import devices
    from plugins.core.system.memory import in_use_gib, total_gib
    from plugins.find_batch import sizes
    from plugins.find_batch.finder import find
    from plugins.find_batch.trials import Stopped, Trials
    from plugins.trial_run.command import prepared

    device = devices.own()
    limit = sizes.gib(memory, total_gib(device))
    if device.type == "cpu" and limit <= (least := in_use_gib(device)):
        raise AccelError(f"--memory={memory}: a process with torch loaded takes {sizes.shown(least)} before it trains")
    prepared(command)
    console = Console(markup=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix="accel_find_batch_") as folder, console.status("") as status:
        trials = Trials(command, Path(folder), wanted, limit, updates, timeout, status.update)
        try:
            found = find(trials, device, MOST)
        except Stopped:
            print("accel: interrupted", file=sys.stderr)
            return INTERRUPTED
    _print(console, found)
    if found.best is None:
        return NOTHING_FITS
    advice = found.advice(command, trials.host)
    _print_advice(console, advice)
    return _apply(advice) if apply else 0


def whole(text: str) -> int:
    """An effective batch.

    Raises:
        AccelError: no whole number of at least 1: no micro-batch divides it.
    """
    if not text.isdecimal() or int(text) < 1:
        raise AccelError(f"--effective-batch={text}: no micro-batch divides it; expected an integer of at least 1")
    return int(text)


def _print(console: Console, found: Found) -> None:
    from plugins.find_batch.sizes import shown

    batch = found.effective_batch or 1
    unit = f"s for {batch} samples" if found.effective_batch else "ms a sample"
    table = Table("micro-batch", "peak", unit, "", title=f"limit {shown(found.limit_gib)}")
    for one in sorted(found.measured, key=lambda one: one.micro_batch):
        table.add_row(
            str(one.micro_batch), shown(one.peak_gib), _seconds(one.sample_seconds, found.effective_batch),
            found.verdict(one),
        )  # fmt: skip
    console.print(table)
    if found.tried:
        steps = Table("step, with those kept before it", "micro-batch", "peak", unit, "", title="rescue")
        for tried in found.tried:
            measured = tried.measured
            peak, seconds = (measured.peak_gib, measured.sample_seconds) if measured else (None, None)
            steps.add_row(
                tried.step.name, str(measured.micro_batch) if measured else "-", shown(peak),
                _seconds(seconds, found.effective_batch), found.verdict_of(tried),
            )  # fmt: skip
        console.print(steps)
    for line in found.lines():
        console.print(line)


def _seconds(sample_seconds: float | None, effective_batch: int | None) -> str:
    if sample_seconds is None:
        return "-"
    return f"{sample_seconds * effective_batch:.2f}" if effective_batch else f"{sample_seconds * 1000:.1f}"


def _print_advice(console: Console, advice: Advice) -> None:
    for line in advice.by_hand:
        console.print(line)
    console.print(f"$ {advice.line}", soft_wrap=True)


def _apply(advice: Advice) -> int:
    """Run it, where the command is all that has to be changed; returns its exit code."""
    if advice.by_hand:
        print(
            "accel: --apply: not run, as the micro-batch stands in the script; change it as said above", file=sys.stderr
        )
        return BAD_INPUT
    return subprocess.run(_program(advice.command), env={**os.environ, **advice.environment}, check=False).returncode


def _program(command: Sequence[str]) -> list[str]:
    """The commands of this environment are found also where its folder is not on the path."""
    beside = Path(sys.executable).with_name(command[0])
    return [str(beside) if beside.is_file() else command[0], *command[1:]]
