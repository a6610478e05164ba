"""A trial of a fit: its files in another folder, another micro-batch, and loggers that write nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch.loggers.logger import DummyLogger


def limit(trainer: Any, folder: Path, resized: Callable[[Any], Any]) -> None:
    """Set what a trial changes on a trainer whose fit begins, in `setup`: the last event before it loads data.

    Args:
        trainer: the host's; its process ends with the trial, so nothing is put back.
        folder: takes the place of `default_root_dir`.
        resized: of the training loader, one with the trial's micro-batch.
    """
    for logger in trainer.loggers:
        if isinstance(written := getattr(logger, "log_dir", None), str):
            _take_back(Path(written))
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]  # as the host does at fast_dev_run
    trainer._default_root_dir = str(folder)
    source = trainer.fit_loop._data_source
    given = source.dataloader
    source.dataloader = lambda: resized(given())


def _take_back(folder: Path) -> None:
    """The host starts its loggers before any event: this process's file of events goes, and what is empty by now."""
    began = psutil.Process().create_time()
    for file in folder.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
        file.unlink()
    with contextlib.suppress(OSError):
        while folder.stat().st_ctime >= min(began, time.time()):
            folder.rmdir()  # refuses where something lies in it
            folder = folder.parent
