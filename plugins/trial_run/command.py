"""The user's own command, with the plug in it."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from plugins.errors import AccelError

YOLO = ("yolo", "ultralytics")
NO_TRAINING = ("val", "predict", "export", "track", "benchmark", "tune", "solutions", "settings", "checks", "version",
               "help", "copy-cfg", "cfg")  # fmt: skip
PLUGS = ("plugins.yolo", "plugins.hf", "plugins.easyocr", "plugins.loop", "plugins.lightning", "plugins.AccelCallback")
# What a script imports, and the line that plugs in; the first that is found counts.
LINES = (
    ("ultralytics", "from plugins.yolo import attach, and attach(model) before model.train(...)"),
    ("transformers", "from plugins.hf import AccelCallback, and Trainer(..., callbacks=[AccelCallback])"),
    ("lightning", "from plugins.lightning import AccelLightning, and Trainer(callbacks=[AccelLightning()])"),
    ("", "from plugins.loop import Accelerated, and accel = Accelerated(model, optimizer)"),
)
EXAMPLES = "such as yolo train ..., python train.py, accel fit lines.yaml"


def prepared(command: Sequence[str]) -> list[str]:
    """What is run for a command that the user typed.

    `yolo train` gets `plugins.yolo`, `accel fit` and Python's scripts run in this interpreter.

    Raises:
        AccelError: no command, a program that is not there, one that does not train, or a script without the plug.
    """
    if not command:
        raise AccelError(f"command: none was given; expected one after --, {EXAMPLES}")
    first, rest = command[0], list(command[1:])
    name = Path(first).name
    if name in YOLO:
        return [sys.executable, "-m", "plugins.yolo", *_training(name, rest)]
    if name == "accel":
        if rest[:1] != ["fit"]:
            raise AccelError(f"command=accel {' '.join(rest)}: no training; allowed is accel fit CONFIG")
        if "--resume" in rest:
            raise AccelError("command=accel fit --resume: a trial begins anew, in a folder of its own; leave it out")
        return [sys.executable, "-m", "plugins.cli", *rest]
    if re.fullmatch(r"python[\d.]*", name):
        if rest[:2] != ["-m", "plugins.yolo"] and (script := _script(rest)) is not None:
            check_script(script)
        return [sys.executable if first == name else first, *rest]
    if name.endswith(".py"):
        check_script(Path(first))
        return [sys.executable, first, *rest]
    if shutil.which(first) is None:
        raise AccelError(f"command={first}: no such program; expected a training, {EXAMPLES}")
    return [first, *rest]


def _training(name: str, arguments: list[str]) -> list[str]:
    words = [word.removeprefix("--") for word in arguments]
    if other := next((word for word in words if word.removeprefix("mode=") in NO_TRAINING), None):
        raise AccelError(f"command={name} {other}: no training; allowed is {name} train ...")
    if "train" not in words and "mode=train" not in words:
        raise AccelError(f"command={name} {' '.join(arguments)}: no training; allowed is {name} train ...")
    if resumed := next((word for word in words if re.match(r"resume\b(?!=(False|false)$)", word)), None):
        raise AccelError(f"command={name} train {resumed}: a trial begins anew, in a folder of its own; leave it out")
    return arguments


def _script(arguments: list[str]) -> Path | None:
    """The file that Python is given, also as a module of the current folder; None where it is not to be found."""
    while arguments and arguments[0].startswith("-"):
        if arguments[0] == "-m" and len(arguments) > 1:
            at = Path(*arguments[1].split("."))
            return next((p for p in (at.with_suffix(".py"), at / "__main__.py") if p.is_file()), None)
        if arguments[0] == "-c":
            return None
        arguments = arguments[2:] if arguments[0] in ("-W", "-X") else arguments[1:]
    return Path(arguments[0]) if arguments else None


def check_script(script: Path) -> None:
    """Whether a script, or a file beside it that it imports, uses a plug.

    Raises:
        AccelError: there is no such file, or it would train without the plug: the line to add.
    """
    if not script.is_file():
        raise AccelError(f"command={script}: no such file; expected a training, {EXAMPLES}")
    seen: set[str] = set()
    for name in _imported(script, {script}):
        if f"{name}.".startswith(tuple(f"{plug}." for plug in PLUGS)):
            return
        seen.add(name.partition(".")[0])
    line = next(line for host, line in LINES if not host or host in seen)
    raise AccelError(f"command={script}: does not use the plug, which a trial needs; add {line}")


def _imported(file: Path, seen: set[Path]) -> Iterator[str]:
    """Modules that a file imports, at any depth of it, and those of the files beside it that it takes in."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # Python will say so
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    yield from names
    for name in names:
        at = file.parent.joinpath(*name.lstrip(".").split("."))
        for beside in (at.with_suffix(".py"), at / "__init__.py"):
            if beside.is_file() and beside not in seen:
                seen.add(beside)
                yield from _imported(beside, seen)
