"""What `accel doctor` finds: what a host or torch lacks here, packages in our way, and the start-up file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOSTS = {"ultralytics": "ultralytics", "huggingface": "transformers", "easyocr": "easyocr"}  # folder, package
START = "accel_plugins"


class Lack(NamedTuple):
    """A row of the table of what this installation does without.

    Attributes:
        of: torch, or a host.
        symbol: what is missing.
        since: the first release seen to have it.
        without: what is done instead.
    """

    of: str
    symbol: str
    since: str
    without: str


def lacking() -> Iterator[Lack]:
    """Of torch and of every host that is installed."""
    from plugins.core.system import versions

    for symbol in versions.TABLE:
        if not symbol.here:
            yield Lack("torch", symbol.name, symbol.since, symbol.without)
    for room, package in HOSTS.items():
        if importlib.util.find_spec(package) is None:
            continue
        try:
            table = importlib.import_module(f"integrations.{room}.versions").TABLE
        except ImportError as error:
            yield Lack(package, str(error), "", "this plug does not load")
            continue
        for symbol in table:
            if not symbol.here:
                yield Lack(package, symbol.path, symbol.since, symbol.without or "this plug cannot do without it")


def others() -> list[Path]:
    """Packages named as ours that a Python here would find, in the order of its search: a script's folder first."""
    ours = Path(__file__).parents[1]
    found = [
        folder / name
        for folder in dict.fromkeys(Path(entry or ".").resolve() for entry in ("", *sys.path))
        for name in ("plugins", "integrations")
        if folder != ours and any((folder / name).glob("*.py"))
    ]
    return [path for path in found if not (path.parent / f"{START}_start.py").is_file()]  # a copy of this project


def start_up_file() -> Path | None:
    """The one line of ours that every Python of this environment runs."""
    places = (Path(entry) / f"{START}.pth" for entry in sys.path if entry)
    return next((path for path in places if path.is_file() and "site-packages" in path.parts), None)


def words() -> Iterator[str]:
    """On packages in the way, and on the start-up file."""
    for other in others():
        yield (
            f"another package named {other.name}: {other}. Python takes the first that it finds, in a script's own "
            "folder and then along sys.path: rename that one, or start from elsewhere, where the plug is not found"
        )
    if path := start_up_file():
        yield (
            f"start-up file: {path}. Its line runs in every Python of this environment, and does nothing but in a yolo "
            "command that names callbacks= or accel. settings. To remove it, delete the file: `python -m plugins.yolo "
            "train ...` then stands in for `yolo train ... callbacks=plugins.yolo`"
        )
    else:
        yield "start-up file: none; use `python -m plugins.yolo train ...` for the stock yolo command"
