"""`accel`: what this machine can do, a recognizer's fine-tuning in one command, and what a run did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from plugins.errors import AccelError
from plugins.find_batch.command_line import find_batch
from plugins.preflight.command import preflight

if TYPE_CHECKING:
    from plugins.core.autotune.plan_cache import PlanCache

Kind = Literal["convolutions", "encoder", "pointwise"]  # of `accel bench`'s models

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _accel() -> None:
    """Faster training, and batches that do not fit in memory."""


@app.command()
def doctor() -> None:
    """Say what was found here: versions, devices, precision, compiler, and what works in another way for lack of it."""
    import torch

    from plugins import doctor as looking
    from plugins.core.compile.toolchain import missing_compiler
    from plugins.core.step.precision import bf16_is_fast
    from plugins.core.system import devices
    from plugins.core.telemetry.report import versions

    table = Table("found", "")
    for name, found in versions("ultralytics", "transformers", "accelerate", "datasets", "easyocr").items():
        table.add_row(name, found)
    for device in devices.every():
        label = f"{torch.get_num_threads()} threads" if device.type == "cpu" else devices.name(device)
        table.add_row(str(device), label)
        table.add_row("  precision=auto", "bf16" if bf16_is_fast(device) else "fp32")
        table.add_row("  compile", missing_compiler(device, "inductor") or "can compile")
    console = _console()
    console.print(table)
    lacks = Table("of", "not in this release", "seen since", "what is done")
    for lack in looking.lacking():
        lacks.add_row(*lack)
    console.print(lacks if lacks.row_count else "all that the plugs use of torch and of the hosts is here")
    for line in looking.words():
        console.print(line)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="A run's folder, or its accel_report.json; two are compared.")],
    html: Annotated[Path | None, typer.Option(help="Also write it as a page, which needs no network.")] = None,
) -> None:
    """Print what a run did, in words and figures, or compare two."""
    from plugins.report_command import report as show

    show(runs, html, _console())


@app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="The official trainer's yaml.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of it, and accel's settings, laid over.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the experiment's own last.pt.")] = False,
) -> None:
    """Fine-tune an EasyOCR recognizer, and leave files that `easyocr.Reader` loads."""
    given: dict[str, Any] = {}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals or key in ("config", "say", "resume"):
            raise AccelError(f"{option}: expected KEY=VALUE, with a key of {config} or a setting of accel")
        given[key] = value
    try:
        from plugins import easyocr
    except ModuleNotFoundError as error:
        raise AccelError(f'fit: needs {error.name}; pip install "accel-plugins[easyocr]"') from None
    result = easyocr.fit(config, resume=resume, **given)
    network = result.exported
    print(f"stopped at update {result.updates}: {result.stopped}; words read right: {result.accuracy:.1%}")
    print(network.source(result.lang_list))
    for note in network.remarks():
        print(note)
    print(f"report: {result.report}")
    if result.stopped == "interrupted":
        print("to go on: the same command with --resume", file=sys.stderr)
        raise typer.Exit(130)


@app.command()
def bench(
    kind: Annotated[Kind | None, typer.Argument(help="Of model; default: all three.")] = None,
    updates: Annotated[int, typer.Option(min=5, help="Timed updates of every contender.")] = 20,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compiled contenders as well.")] = True,
) -> None:
    """Time what each plan gives on this machine, on small models that need no data."""
    from plugins import bench as benchmark
    from plugins.core.system import devices

    device = devices.own()
    console = _console()
    for name in [kind] if kind else get_args(Kind):
        with console.status("") as status:
            found = benchmark.bench(name, updates, compiled, device, status.update, console.print)
        table = Table("contender", "ms an update", "spread", "ratio", "first, s", "pays at update", title=name)
        for one in found:
            pays = one.pays(found[0])
            table.add_row(
                one.name, f"{one.timing.middle * 1000:.1f}", f"{one.timing.spread * 1000:.1f}",
                f"{one.against(found[0]):.2f}", f"{one.timing.first:.1f}", "-" if pays is None else str(pays),
            )  # fmt: skip
        console.print(table)


@app.command()
def repair(
    file: Annotated[Path, typer.Argument(help="A checkpoint: .pt, .pth, .bin, .ckpt or .safetensors.")],
    output: Annotated[Path | None, typer.Option(help="Where to write; NAME.clean.SUFFIX beside it by default.")] = None,
    trust: Annotated[
        bool, typer.Option(help="Also read pickled objects, which runs code of the file's author.")
    ] = False,
    force: Annotated[bool, typer.Option(help="Write over a file that exists.")] = False,
) -> None:
    """Write a checkpoint without the names that compile and parallel wrappers left in it (_orig_mod., module.)."""
    from plugins.repair import repair as write_clean

    found = write_clean(file, output, trust, force)
    if found.path is None:
        print(f"{file}: nothing to rename, nothing written")
        return
    for old, new in found.renamed.items():
        print(f"{old} -> {new}")
    print(f"{found.path}: {len(found.renamed)} names cleaned")


app.command("find-batch")(find_batch)
app.command()(preflight)


def _console() -> Console:
    """Prints words as they are: a path in brackets is no markup."""
    return Console(markup=False, emoji=False)


cache = typer.Typer(no_args_is_help=True, help="What earlier runs learnt: plans, and compiled code.")
app.add_typer(cache, name="cache")
Folder = Annotated[Path | None, typer.Option(help="The cache folder; default: this project's.")]


@cache.command("list")
def list_cache(folder: Folder = None) -> None:
    """Print the remembered plans, and the size of the compiled code."""
    memory = _memory(folder)
    table = Table("work", "plan", "device", "torch", "parameters", "compile", "days old")
    for entry in memory.entries():
        name, age = entry.path.stem[:12], f"{entry.age_days:.1f}"
        if (found := entry.found) is None:
            table.add_row(name, "damaged, or of another release", "-", "-", "-", "-", age)
            continue
        cold = found.compile.cold_seconds
        table.add_row(
            name, found.plan.name, found.device, found.torch, f"{found.parameters:,}",
            f"cold {cold:.1f} s" if cold else "-", age,
        )  # fmt: skip
    console = _console()
    console.print(table)
    code = [path.stat().st_size for path in memory.inductor.rglob("*") if path.is_file()]
    console.print(f"{memory.folder}: {table.row_count} plans, {sum(code) / 2**20:.1f} MiB of compiled code")


@cache.command()
def prune(
    older_than: Annotated[float, typer.Option(min=0, help="Days; 0 removes everything.")] = 30.0, folder: Folder = None
) -> None:
    """Remove plans and compiled code that were not written for so many days."""
    from plugins.core.autotune.plan_cache import CacheError

    memory = _memory(folder)
    try:
        plans, code = memory.prune(older_than)
    except CacheError as error:
        raise AccelError(f"folder={error}") from None
    except OSError as error:
        raise AccelError(f"folder={memory.folder}: {error.strerror or error}: {error.filename}") from None
    print(f"removed {plans} plans and {code} files of compiled code")


@cache.command("export")
def export_cache(target: Annotated[Path, typer.Argument(help="The .tar.gz to write.")], folder: Folder = None) -> None:
    """Pack plans and compiled code, to warm another machine of the same kind."""
    from plugins.core.autotune.cache_archive import export

    memory = _memory(folder)
    try:
        count = export(memory, target)
    except OSError as error:
        raise AccelError(f"target={target}: {error.strerror or error}") from None
    print(f"packed {count} files into {target}")


@cache.command("import")
def import_cache(
    source: Annotated[Path, typer.Argument(help="What `accel cache export` wrote; it holds code: trust it.")],
    folder: Folder = None,
) -> None:
    """Unpack what `accel cache export` wrote."""
    from plugins.core.autotune.cache_archive import load
    from plugins.core.autotune.plan_cache import CacheError

    memory = _memory(folder, there=False)
    try:
        count = load(memory, source)
    except CacheError as error:
        raise AccelError(f"source={error}") from None
    print(f"unpacked {count} files into {memory.folder}")


def _memory(folder: Path | None, there: bool = True) -> PlanCache:
    from plugins.core.autotune.plan_cache import PlanCache, default_folder

    memory = PlanCache(folder or default_folder())
    if there and not memory.folder.is_dir():
        raise AccelError(f"folder={memory.folder}: no such folder; a run writes it, or give --folder")
    return memory


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 1."""
    try:
        app()
    except AccelError as error:
        print(f"accel: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # a name that no file can have, a folder that may not be looked into, a full disk
        if not error.filename:
            raise
        print(f"accel: {AccelError(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
