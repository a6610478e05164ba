"""The host's own DDP on two CPU ranks: a trainer that its command starts twice, and what the workers note.

The host asks for several devices before it starts workers, and its workers ask for CUDA. This trainer says that the CPU
is two devices, and joins over gloo; the state file, the script, the command, the wrapping and the loop are the host's.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from ultralytics import YOLO
from ultralytics.engine import trainer as engine
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOCAL_RANK, RANK

from plugins.yolo import attach
from tests.ultralytics.conftest import PLAIN, freeze_batchnorm, tensors
from tests.ultralytics.spy import Spy

RANKS = 2
NOTES = "NOTES"  # in the environment: where the workers write
KEPT = "kept"


class OnTwoRanks(DetectionTrainer):  # type: ignore[misc]
    """Trains on the CPU as if it were two devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.world_size, self.ddp = RANKS, LOCAL_RANK == -1

    def _setup_ddp(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    def _setup_train(self) -> None:
        whole = nn.parallel.DistributedDataParallel

        class OnCpu(whole):  # type: ignore[misc, valid-type]
            """The host names a device, which a model on the CPU must not have."""

            def __init__(self, module: nn.Module, device_ids: Any = None, **kwargs: Any) -> None:
                super().__init__(module, **kwargs)

        nn.parallel.DistributedDataParallel = OnCpu  # type: ignore[misc]
        try:
            super()._setup_train()
        finally:
            nn.parallel.DistributedDataParallel = whole  # type: ignore[misc]

    def final_eval(self) -> None:
        """The host's asks for its device by name."""


class Notes:
    """Of one worker: its updates, its weights at the end, and what it was held by."""

    def __init__(self) -> None:
        self.spy = Spy(heavy=True)
        self.size = 0

    def started(self, trainer: Any) -> None:
        self.size = trainer.accel.size
        model = trainer.model
        trainer.model = engine.unwrap_model(model)
        self.spy.heavy = not trainer.resume  # which settles BatchNorm's statistics
        self.spy.hold(trainer)
        trainer.model = model

    def ended(self, trainer: Any) -> None:
        found = {"updates": self.spy.updates, "weights": tensors(engine.unwrap_model(trainer.model)), "size": self.size}
        torch.save(found, Path(os.environ[NOTES]) / f"{trainer.args.name}-{RANK}.pt")


notes = Notes()


def started(trainer: Any) -> None:
    notes.started(trainer)


def ended(trainer: Any) -> None:
    notes.ended(trainer)


def keep(trainer: Any) -> None:
    """What a run that was killed after its first epoch would have left."""
    if trainer.epoch == 0:
        shutil.copytree(trainer.wdir, Path(os.environ[NOTES]) / KEPT)


def main(model: str, data: str, folder: str, name: str, accumulate: str, resume: str = "") -> None:
    plugged = attach(YOLO(resume or model), plan="off", accumulate=int(accumulate), batchnorm="freeze", clip_norm="off")
    for event, function in {"on_train_start": started, "teardown": ended, "on_model_save": keep,
                            "on_train_batch_start": freeze_batchnorm}.items():  # fmt: skip
        plugged.add_callback(event, function)
    more = {"resume": True} if resume else {"data": data, "epochs": 2, "batch": 4, "imgsz": 64, "warmup_epochs": 0,
            "optimizer": "SGD", "plots": False, "val": False, "workers": 0, "project": folder, "name": name,
            "amp": False, "device": "cpu", **PLAIN}  # fmt: skip
    plugged.train(trainer=OnTwoRanks, **more)


if __name__ == "__main__":
    import sys

    from tests.ultralytics.two_ranks import main as imported  # by name, so that workers find the callbacks

    imported(*sys.argv[1:])
