"""Runs that stop after a save, and what is left then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any


class Killed(Exception):
    """Stands for a kill: raised after a save, nothing of the host's end is reached."""


def stop_after(epoch: int) -> dict[str, Callable[[Any], None]]:
    def stop(trainer: Any) -> None:
        if trainer.epoch == epoch:
            raise Killed

    return {"on_fit_epoch_end": stop}


def keep_copies(trainer: Any) -> None:
    """`on_fit_epoch_end`: what a kill at this instant would leave, in a folder of its own."""
    shutil.copytree(trainer.save_dir, trainer.save_dir.with_name(f"after{trainer.epoch}"), dirs_exist_ok=True)


ALONE = """
import sys
sys.modules["plugins"] = sys.modules["integrations"] = None
from ultralytics import YOLO
model = YOLO(sys.argv[1])
if sys.argv[2] == "resume":
    model.train(resume=True)
    print("epochs", model.trainer.start_epoch, model.trainer.epoch)
else:
    print("exported", model.export(format="onnx", imgsz=64, simplify=False))
"""
