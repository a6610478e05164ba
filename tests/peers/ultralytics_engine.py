"""Runs Ultralytics' own tests of its engine and command twice, alone and with the plug in every model, and compares.

    python tests/peers/ultralytics_engine.py CHECKOUT/tests [pytest arguments, as -k train]

The suite itself is not copied: give the `tests` folder of the installed release's source package. `test_engine.py` and
`test_cli.py` are run; commands that they start as processes of their own get the plug by their arguments. What they
download is drawn first (`ultralytics_stand_ins.py`). Tests that need more of the network or an accelerator skip or fail
both times and do not count. Exit status 1: a test passes alone and not
with the plug, and is not among `ALLOWED`. This file is also the pytest plugin that puts the plug in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from twice import WITH_PLUG, Suite  # beside this file, which is run as a script

SUITES = ("test_engine.py", "test_cli.py")

ALLOWED = {
    "*test_engine.test_distill_resume": "distill_model is refused in one line",
    "*test_cli.test_distill*": "distill_model is refused in one line",
}
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


def main(arguments: list[str]) -> int:
    if not arguments or not any((Path(arguments[0]) / name).is_file() for name in SUITES):
        sys.exit(f"usage: {Path(__file__).name} FOLDER [pytest arguments]; FOLDER holds Ultralytics' {SUITES[0]}")
    folder = Path(arguments[0]).resolve()
    files = [folder / name for name in SUITES if (folder / name).is_file()]
    suite = Suite("ultralytics", Path(__file__), files, folder.parent, OFFLINE, ALLOWED, prepare)
    return suite.compare(arguments[1:])


def prepare(scratch: Path) -> dict[str, str]:
    """What the tests would download, in `scratch`; returns the variables that lead there."""
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ultralytics_stand_ins.py")), str(scratch)], check=True
    )
    return {"YOLO_CONFIG_DIR": str(scratch)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
