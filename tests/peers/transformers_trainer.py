"""Runs transformers' own tests of its Trainer twice, alone and with AccelCallback in every Trainer, and compares.

    python tests/peers/transformers_trainer.py CHECKOUT/tests/trainer [pytest arguments, as -k checkpoint]

The suite itself is not copied: give the folder of a checkout of the installed release. Tests that need the network or
an accelerator skip or fail both times and do not count. Exit status 1: a test passes alone and not with the plug,
and is not among `ALLOWED`. This file is also the pytest plugin that puts the callback in.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from twice import WITH_PLUG, Suite  # beside this file, which is run as a script

ALLOWED = {
    "*TrainerCallbackTest.test_init_callback": "pins the list of callbacks",
    "*TrainerCallbackTest.test_add_remove_callback": "pins the list of callbacks",
    "*TrainerCallbackTest.test_custom_callback_added_at_init": "pins the list of callbacks",
    "*TrainerCallbackTest.test_default_callbacks_are_present": "pins the list of callbacks",
    "*TrainerCallbackTest.test_printer_callback_when_tqdm_disabled": "pins the list of callbacks",
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


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).exists():
        sys.exit(f"usage: {Path(__file__).name} FOLDER [pytest arguments]; FOLDER is transformers' tests/trainer")
    folder = Path(arguments[0]).resolve()
    root = next((parent.parent for parent in (folder, *folder.parents) if parent.name == "tests"), folder)
    return Suite("transformers", Path(__file__), [folder], root, OFFLINE, ALLOWED).compare(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
