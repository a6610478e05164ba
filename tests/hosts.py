"""Every host and the plain loop, run through the same few micro-batches: for tests that hold for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.easyocr import fit, training
from plugins.loop import Accelerated
from tests.easyocr.conftest import TINY, numbers, write_folder
from tests.huggingface.runs import trainer_for
from tests.ultralytics.conftest import PLAIN, write_data, write_model

COMMON: dict[str, Any] = {"plan": "off", "compile": "off", "precision": "fp32", "memory_format": "host"}
BATCH = 4  # samples a micro-batch


class Killed(Exception):
    """Stands for a kill right after a save: nothing of the host's end is reached."""


@dataclass
class Ran:
    """What a run has left: its report, and the live weights."""

    report: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def window(self) -> dict[str, Any]:
        return dict(self.report["window"])


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def poison(model: nn.Module, at: int | None) -> None:
    """The gradient of micro-batch `at`, counted from 0, is NaN."""
    backwards = iter(range(10**6))
    parameter = next(p for p in model.parameters() if p.requires_grad)
    if at is not None:
        parameter.register_hook(lambda g: g * float("nan") if next(backwards) == at else g)


def report_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "accel_report.json").read_text()))


Run = Callable[..., Ran]
"""`run(folder, micro_batches, nan=None, stop=None, resume=None, **options)`.

nan: this micro-batch's gradient is not finite. stop: save in update number `stop` or at its end, and be killed.
resume: the folder of a run that was; options: fields of `AccelConfig`.
"""


def loop(
    folder: Path,
    micro_batches: int,
    nan: int | None = None,
    stop: int | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Ran:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    draw = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(BATCH, 8, generator=draw), torch.randint(3, (BATCH,), generator=draw))
        for _ in range(micro_batches)
    ]
    poison(model, nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accel = Accelerated(model, optimizer, micro_batch=BATCH, say=lambda line: None, **{**COMMON, **options})
    first = accel.resume(resume / "last.pt")["position"] if resume is not None else 0

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    accel.train()
    for position, batch in enumerate(accel.batches(data[first:]), first + 1):
        accel.training_step(loss, batch)
        if stop is not None and accel.updates == stop and accel.session.window.micro_batches == 1:
            accel.save(folder / "last.pt", position=position)  # in the middle of a window
            accel.end()
            raise Killed
    with accel.validation(), torch.no_grad():
        model(data[0][0])
    accel.end(folder)
    return Ran(report_in(folder), weights_of(model))


def huggingface(
    folder: Path,
    micro_batches: int,
    nan: int | None = None,
    stop: int | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Ran:
    run = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "optim": "adamw_torch",
        "eval_strategy": "epoch",
    }
    trainer, spy = trainer_for("bert-token", folder, BATCH * micro_batches, options={**COMMON, **options}, **run)
    poison(trainer.model, nan)

    def ends(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == stop:
            raise Killed

    spy.on_save = ends  # type: ignore[attr-defined]
    trainer.train(resume_from_checkpoint=str(newest(resume)) if resume is not None else None)
    return Ran(report_in(folder), weights_of(trainer.model))


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def ultralytics(
    folder: Path,
    micro_batches: int,
    nan: int | None = None,
    stop: int | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Ran:
    """An epoch has 3 micro-batches: a save lies in the middle of a window of 2."""
    from ultralytics import YOLO

    from plugins.yolo import attach

    here = folder if resume is None else resume
    here.mkdir(parents=True, exist_ok=True)
    last = here / "run" / "weights" / "last.pt"
    model = YOLO(str(write_model(here, "detect") if resume is None else last))
    attach(model, **{**COMMON, **options})

    def ends(trainer: Any) -> None:
        if stop is not None and trainer.epoch == 0:
            raise Killed

    model.add_callback("on_train_start", lambda trainer: poison(trainer.model, nan))
    model.add_callback("on_fit_epoch_end", ends)
    arguments: dict[str, Any] = {"resume": True}
    if resume is None:
        arguments = {
            "data": str(write_data(here / "data", train=3 * BATCH, val=2)),
            "epochs": micro_batches // 3,
            "batch": BATCH,
            "imgsz": 64,
            "warmup_epochs": 0,
            "optimizer": "SGD",
            "plots": False,
            "workers": 0,
            "project": str(here),
            "name": "run",
            **PLAIN,
        }
    model.train(**arguments)
    return Ran(report_in(here / "run"), weights_of(model.trainer.model))


def easyocr(
    folder: Path,
    micro_batches: int,
    nan: int | None = None,
    stop: int | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Ran:
    """Trains until a number of updates: its last window is always full."""
    here = folder if resume is None else resume
    if resume is None:
        write_folder(here / "train", numbers(12))
        write_folder(here / "valid", numbers(4, seed=1), seed=100)
    updates = micro_batches // int(options.get("accumulate", 1))
    settings = {
        "number": "0123456789",
        "experiment_name": "run",
        "train_data": str(here / "train"),
        "valid_data": str(here / "valid"),
        "output": str(here / "runs"),
        "imgH": 32,
        "batch_size": BATCH,
        "num_iter": updates,
        "valInterval": 2,
        "optim": "adam",
        "lr": 0.001,
        "progress": False,
        "tensorboard": False,
        **TINY,
    }
    held: list[training.Run] = []

    class Watched(training.Run):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            held.append(self)
            poison(self.model, nan)

        def _save(self) -> None:
            super()._save()
            if self.accel.updates == stop:
                raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Run", Watched)
        result = fit(settings, resume=resume is not None, say=lambda line: None, **{**COMMON, **options})
    return Ran(report_in(result.folder), weights_of(held[0].model))


def lightning(
    folder: Path,
    micro_batches: int,
    nan: int | None = None,
    stop: int | None = None,
    resume: Path | None = None,
    **options: Any,
) -> Ran:
    """An epoch has 3 micro-batches, and its end closes a window; saved at its end."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from plugins.lightning import AccelLightning
    from tests.lightning.runs import Module, trainer

    class Ends(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if stop is not None and trainer.global_step >= stop:
                raise Killed

    draw, module = torch.Generator().manual_seed(1), Module()
    data = TensorDataset(torch.randn(3 * BATCH, 3, generator=draw), torch.randn(3 * BATCH, 2, generator=draw))
    poison(module, nan)
    saving = ModelCheckpoint(dirpath=folder, filename="last")
    made = trainer(
        folder, Ends(), saving, AccelLightning(**{**COMMON, **options}), max_epochs=micro_batches // 3,
        enable_checkpointing=True,
    )  # fmt: skip
    batches = DataLoader(data, batch_size=BATCH)
    made.fit(module, batches, batches, ckpt_path=resume / "last.ckpt" if resume is not None else None)
    return Ran(report_in(folder), weights_of(module))


RUNS: dict[str, Run] = {
    "loop": loop,
    "huggingface": huggingface,
    "ultralytics": ultralytics,
    "easyocr": easyocr,
    "lightning": lightning,
}


@contextmanager
def killed() -> Iterator[None]:
    with pytest.raises(Killed):
        yield
