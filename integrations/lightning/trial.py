"""A trial of a fit: its files in another folder, another micro-batch, and loggers that write nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
            _take_back(Path(written), logger.save_dir)
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]  # as the host does at fast_dev_run
    trainer._default_root_dir = str(folder)
    source = trainer.fit_loop._data_source
    given = source.dataloader
    source.dataloader = lambda: resized(given())


def _take_back(folder: Path, user_folder: str | os.PathLike[str] | None) -> None:
    """The host starts its loggers before any event: this process's file of events goes, and what is empty by now.

    Of folders, only those inside the logger's `save_dir`: that one, and what is above it, is the user's.
    """
    for file in folder.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
        file.unlink()
    if user_folder is None:  # a logger that says nothing of it
        return
    expanded = os.path.expandvars(user_folder)  # as the host does for `log_dir`
    top = Path(os.path.expanduser(expanded))  # noqa: PTH111 - Path's own raises
    with contextlib.suppress(OSError):
        while top in folder.parents:
            folder.rmdir()  # refuses where something lies in it
            folder = folder.parent
