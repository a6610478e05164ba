"""One short training a host, which starts or goes on from what lies in its folder: for `tests/trust/kills.py`.

Each has what a resume can lose: dropout, momentum, a moving average, a schedule, a window that a save lies in, an order
of samples that is drawn, and saves after nearly every update.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.loop import Accelerated
from tests.hosts import COMMON, newest, weights_of

OPTIONS: dict[str, Any] = {**COMMON, "accumulate": 2, "ema": 0.9}
Weights = dict[str, Tensor]


def loop(folder: Path, micro_batches: int = 60) -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accel = Accelerated(
        model, optimizer, micro_batch=4, say=lambda line: None, **OPTIONS,
        schedule=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, micro_batches // 2),
    )  # fmt: skip
    last, first = folder / "last.pt", 0
    if last.is_file():
        first = accel.resume(last)["position"]
    accel.train()
    for position in range(first, micro_batches):
        images = torch.randn(4, 8)  # of the run's own random state
        accel.training_step(lambda x: nn.functional.cross_entropy(model(x), x.argmax(1) % 3), images)
        if position % 3 == 0:
            accel.save(last, position=position + 1)
    accel.flush()
    accel.end(folder)
    return {**weights_of(model), **{f"average.{name}": value for name, value in accel.weights().items()}}


def huggingface(folder: Path, micro_batches: int = 12) -> Weights:
    from tests.huggingface.runs import trainer_for

    run = {
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1,
        "save_total_limit": 2, "optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear",
        "train_sampling_strategy": "random", "eval_strategy": "steps", "eval_steps": 3, "max_grad_norm": 1.0,
    }  # fmt: skip
    trainer, _ = trainer_for("bert-token", folder, 2 * micro_batches, options=OPTIONS, **run)
    trainer.train(resume_from_checkpoint=True if any(folder.glob("checkpoint-*")) else None)
    kept = torch.load(newest(folder) / "accel_state.pt", weights_only=True)["raw"]
    return {**weights_of(trainer.model), **{f"raw.{name}": value for name, value in kept.items()}}


def ultralytics(folder: Path, epochs: int = 3) -> Weights:
    from ultralytics import YOLO

    from plugins.yolo import attach
    from tests.ultralytics.conftest import PLAIN, write_data, write_model

    last = folder / "run" / "weights" / "last.pt"
    data, written = folder / "data", folder / "run"
    if last.is_file():
        if torch.load(last, weights_only=False)["epoch"] in (-1, epochs - 1):
            return _of_file(last)  # killed after the last epoch's save: the host says that nothing is to be resumed
        model, arguments = YOLO(str(last)), {"resume": True}
    else:
        shutil.rmtree(written, ignore_errors=True)
        shutil.rmtree(data, ignore_errors=True)
        model = YOLO(str(write_model(folder, "detect")))
        arguments = {
            "data": str(write_data(data, train=12, val=2)), "epochs": epochs, "batch": 4, "imgsz": 64,
            "warmup_epochs": 0, "optimizer": "SGD", "plots": False, "workers": 0, "project": str(folder),
            "name": "run", **PLAIN,
        }  # fmt: skip
    attach(model, **{**COMMON, "accumulate": 2})
    model.train(**arguments)
    return _of_file(last)


def _of_file(path: Path) -> Weights:
    state = torch.load(path, weights_only=False)
    return weights_of(state["model"] or state["ema"])


def easyocr(folder: Path, updates: int = 5) -> Weights:
    from plugins.easyocr import fit
    from tests.easyocr.conftest import TINY, numbers, write_folder

    run = folder / "runs" / "numbers_run"
    going_on = (run / "last.pt").is_file()
    if not going_on:
        shutil.rmtree(folder, ignore_errors=True)  # killed before anything was saved
        write_folder(folder / "train", numbers(10))
        write_folder(folder / "valid", numbers(3, seed=1), seed=100)
    settings = {
        "number": "0123456789", "experiment_name": "numbers_run", "train_data": str(folder / "train"),
        "valid_data": str(folder / "valid"), "output": str(folder / "runs"), "imgH": 32, "batch_size": 4,
        "num_iter": updates, "valInterval": 1, "optim": "adam", "lr": 0.001, "schedule": "cosine", "augment": True,
        "progress": False, "tensorboard": False, **TINY,
    }  # fmt: skip
    fit(settings, resume=going_on, say=lambda line: None, **OPTIONS)
    state = torch.load(run / "last.pt", weights_only=True)
    best = torch.load(run / "best_accuracy.pth", weights_only=True)
    return {**state["model"], **{f"best.{name}": value for name, value in best.items()}}


RUNS: dict[str, Callable[[Path], Weights]] = {
    "loop": loop,
    "huggingface": huggingface,
    "ultralytics": ultralytics,
    "easyocr": easyocr,
}
