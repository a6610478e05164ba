"""`accel`: what this machine can do, and what a run did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from plugins.errors import AccelError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _accel() -> None:
    """Faster training, and batches that do not fit in memory."""


@app.command()
def doctor() -> None:
    """Say what was found here: versions, devices, precision, compiler."""
    import torch

    from plugins.core.compile import missing_compiler
    from plugins.core.precision import bf16_is_fast
    from plugins.core.report import versions

    table = Table("found", "")
    for name, found in versions("ultralytics", "transformers", "accelerate", "datasets", "easyocr").items():
        table.add_row(name, found)
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for name in devices:
        device = torch.device(name)
        label = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        table.add_row(name, label)
        table.add_row("  precision=auto", "bf16" if bf16_is_fast(device) else "fp32")
        table.add_row("  compile", missing_compiler(device, "inductor") or "can compile")
    Console().print(table)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder, or its accel_report.json.")]) -> None:
    """Print what a run did, in words and figures."""
    from plugins.core.render import summary
    from plugins.core.report import JSON_NAME

    path = run / JSON_NAME if run.is_dir() else run
    if not path.is_file():
        raise AccelError(f"run={run}: no {JSON_NAME} there; expected a run's folder or that file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        words = summary(data)
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise AccelError(f"run={path}: not an accel report: {type(error).__name__} {error}") from None
    console = Console()
    console.print(words)
    for warning in data["warnings"]:
        console.print(f"[yellow]warning[/] {warning}")
    table = Table("part", "field", "value")
    for part in ("window", "compile", "speed", "memory", "gradients", "batchnorm", "ema"):
        for name, value in data[part].items():
            table.add_row(part, name, str(value))
    console.print(table)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 1."""
    try:
        app()
    except AccelError as error:
        print(f"accel: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
