"""Runs Ultralytics' own tests of its engine and command twice, alone and with the plug in every model, and compares.

    python tests/peers/ultralytics_engine.py CHECKOUT/tests [pytest arguments, as -k train]

The suite itself is not copied: give the `tests` folder of a checkout of the installed release. `test_engine.py` and
`test_cli.py` are run; commands that they start as processes of their own get the plug by their arguments. Tests that
need the network or an accelerator skip or fail both times and do not count. Exit status 1: a test passes alone and not
with the plug, and is not among `ALLOWED`. This file is also the pytest plugin that puts the plug in.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import wraps
from pathlib import Path
from typing import Any

WITH_PLUG = "PEERS_WITH_PLUG"
SUITES = ("test_engine.py", "test_cli.py")

ALLOWED: dict[str, str] = {}
"""Tests that may differ, as patterns of `module.test`, and why."""

OFFLINE = {
    "YOLO_OFFLINE": "true",
    "ACCEL_PLAN": "off",
    "ACCEL_COMPILE": "off",
    "CUDA_VISIBLE_DEVICES": "",
    "MPLBACKEND": "agg",
}


def pytest_configure(config: Any) -> None:
    """Put the plug's callbacks into every model and trainer of this process, and into commands that it starts."""
    if WITH_PLUG not in os.environ:
        return
    from ultralytics.engine.trainer import BaseTrainer

    from plugins import yolo

    init, start = BaseTrainer.__init__, subprocess.run

    @wraps(init)
    def plugged(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for event, function in yolo.callbacks.items():
            if function not in self.callbacks[event]:
                self.callbacks[event].insert(0, function)

    @wraps(start)
    def run_plugged(command: Any, *args: Any, **kwargs: Any) -> Any:
        text = command if isinstance(command, str) else " ".join(map(str, command))
        if text.startswith("yolo") and " train " in f"{text} ":
            command = (
                f"{text} callbacks=plugins.yolo" if isinstance(command, str) else [*command, "callbacks=plugins.yolo"]
            )
        return start(command, *args, **kwargs)

    BaseTrainer.__init__, subprocess.run = plugged, run_plugged  # type: ignore[assignment]


def run(folder: Path, plug: bool, arguments: list[str]) -> dict[str, str]:
    """Outcomes by `module.test`: passed, failed, error or skipped.

    Raises:
        SystemExit: pytest could not run at all.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "outcomes.xml"
        environment = {**os.environ, **OFFLINE, "ACCEL_CACHE_DIR": scratch}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        if plug:
            environment[WITH_PLUG] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
        files = [str(folder / name) for name in SUITES if (folder / name).is_file()]
        done = subprocess.run(
            [*command, f"--junitxml={log}", *files, *arguments],
            cwd=folder.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if not log.is_file():
            sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        cases = ElementTree.parse(log).getroot().iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def reason(name: str) -> str:
    """Why a test may differ; empty where it may not."""
    return next((why for pattern, why in ALLOWED.items() if fnmatch.fnmatch(name, pattern)), "")


def main(arguments: list[str]) -> int:
    if not arguments or not any((Path(arguments[0]) / name).is_file() for name in SUITES):
        sys.exit(f"usage: {Path(__file__).name} FOLDER [pytest arguments]; FOLDER holds Ultralytics' {SUITES[0]}")
    folder = Path(arguments[0]).resolve()
    alone, plugged = (run(folder, plug, arguments[1:]) for plug in (False, True))
    passed = [name for name, found in alone.items() if found == "passed"]
    differing = {name: plugged.get(name, "missing") for name in passed if plugged.get(name) != "passed"}
    bad = [name for name in differing if not reason(name)]
    for name, found in differing.items():
        print(f"{found:8} {name}" + (f"  (allowed: {reason(name)})" if reason(name) else ""))
    version = importlib.metadata.version("ultralytics")
    print(
        f"ultralytics {version}: {len(passed)} of {len(alone)} tests pass alone; with the plug {len(bad)} of them fail"
    )
    return 1 if bad or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
