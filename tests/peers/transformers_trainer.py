"""Runs transformers' own tests of its Trainer twice, alone and with AccelCallback in every Trainer, and compares.

    python tests/peers/transformers_trainer.py CHECKOUT/tests/trainer [pytest arguments, as -k checkpoint]

The suite itself is not copied: give the folder of a checkout of the installed release. Tests that need the network or
an accelerator skip or fail both times and do not count. Exit status 1: a test passes alone and not with the plug,
and is not among `ALLOWED`. This file is also the pytest plugin that puts the callback in.
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

ALLOWED = {
    "*TrainerCallbackTest.test_init_callback": "pins the list of callbacks",
    "*TrainerCallbackTest.test_add_remove_callback": "pins the list of callbacks",
    "*TrainerCallbackTest.test_event_flow": "takes the callback at a place from the end of the list",
    "*TrainerIntegrationTest.test_best_model_checkpoint_behavior": "counts the files of a run's folder",
    "*TrainerIntegrationTest.test_save_best_checkpoint": "counts the files of a run's folder",
}
"""Tests that may differ, as patterns of `module.Class.test`, and why."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "ACCEL_PLAN": "off", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


def pytest_configure(config: Any) -> None:
    """Put the callback into every Trainer of this process; last, so that places from the front stay."""
    if WITH_PLUG not in os.environ:
        return
    from transformers import Trainer

    from plugins.hf import AccelCallback

    plain = Trainer.__init__

    @wraps(plain)
    def plugged(self: Any, *args: Any, **kwargs: Any) -> None:
        given = list(kwargs.pop("callbacks", None) or [])
        plain(self, *args, callbacks=[*given, AccelCallback], **kwargs)

    Trainer.__init__ = plugged


def run(folder: Path, plug: bool, arguments: list[str]) -> dict[str, str]:
    """Outcomes by `module.Class.test`: passed, failed, error or skipped.

    Raises:
        SystemExit: pytest could not run at all.
    """
    root = next((parent.parent for parent in (folder, *folder.parents) if parent.name == "tests"), folder)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "outcomes.xml"
        environment = {**os.environ, **OFFLINE, "ACCEL_CACHE_DIR": scratch}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        if plug:
            environment[WITH_PLUG] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junitxml={log}", str(folder), *arguments],
            cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
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
    if not arguments or not Path(arguments[0]).exists():
        sys.exit(f"usage: {Path(__file__).name} FOLDER [pytest arguments]; FOLDER is transformers' tests/trainer")
    folder = Path(arguments[0]).resolve()
    alone, plugged = (run(folder, plug, arguments[1:]) for plug in (False, True))
    passed = [name for name, found in alone.items() if found == "passed"]
    differing = {name: plugged.get(name, "missing") for name in passed if plugged.get(name) != "passed"}
    bad = [name for name in differing if not reason(name)]
    for name, found in differing.items():
        print(f"{found:8} {name}" + (f"  (allowed: {reason(name)})" if reason(name) else ""))
    version = importlib.metadata.version("transformers")
    print(
        f"transformers {version}: {len(passed)} of {len(alone)} tests pass alone; with the plug {len(bad)} of them fail"
    )
    return 1 if bad or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
