"""YOLOv8n from scratch on drawn shapes, 160 px, through Ultralytics' own `train`: the host alone, and with the plug."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, Job, Skip, since_start

SIZE, BATCH = 160, 16
Plug = dict[str, Any] | None


def data(job: Job, count: int, held_out: int) -> Path:
    """The data set of the demo, written once for the row."""
    import shapes

    folder = job.shared / f"shapes-{count}"
    if not (folder / "data.yaml").is_file():
        shapes.write(folder, count, held_out, job.sized(SIZE, 64))
    return folder / "data.yaml"


def by_hand(trainer: Any) -> None:
    """`on_train_start`: forward and loss in bf16 autocast, the weights in channels_last."""
    import torch

    model = trainer.model.to(memory_format=torch.channels_last)
    forward = model.forward

    def in_bf16(*given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*given, **named)

    model.forward = in_bf16


def prepared(job: Job, plug: Plug, bf16: bool = False) -> Any:
    """A model with the plug, or without; `bf16`: by hand, for Ultralytics has it on CUDA alone."""
    from ultralytics import YOLO

    model = YOLO("yolov8n.yaml")
    if plug is not None:
        from plugins.yolo import attach

        attach(model, **{"cache_dir": job.folder / "cache", **plug})
    if bf16:
        model.add_callback("on_train_start", by_hand)
    return model


def train(job: Job, model: Any, source: Path, **arguments: Any) -> None:
    batch = job.sized(BATCH, 2)
    given = {
        "data": str(source), "imgsz": job.sized(SIZE, 64), "batch": batch, "nbs": batch, "project": str(job.folder),
        "name": "run", "exist_ok": True, "plots": False, "val": False, "save": False, "verbose": False, "workers": 0,
        "optimizer": "AdamW", "lr0": 0.002, "amp": False, "warmup_epochs": 0, "device": "cpu", **arguments,
    }  # fmt: skip
    model.train(**given)


def steps(job: Job, plug: Plug = None, bf16: bool = False, **arguments: Any) -> None:
    """A run of 2,000 updates, of which some are measured."""
    if job.quick and arguments.get("compile"):
        raise Skip("a compile is no quick thing")
    model = prepared(job, plug, bf16)
    count = job.sized(320, 8)
    batch = job.sized(BATCH, 2)
    model.add_callback("on_train_batch_end", lambda _: job.step(batch))
    train(job, model, data(job, count, 4), epochs=job.sized(100, 3), **arguments)


def first_update(job: Job, plug: Plug = None) -> Figures:
    """Seconds of the process up to the end of its first update."""
    model, found = prepared(job, plug), {}

    def first(_: Any) -> None:
        found["first"] = since_start()
        raise StopIteration

    model.add_callback("on_train_batch_end", first)
    with suppress(StopIteration):
        train(job, model, data(job, job.sized(160, 4), 4), epochs=10)
    return found


def whole(job: Job, micro_batches: int, plug: Plug = None) -> Figures:
    """A whole run of small images, imports included; and the part of it from the first batch to the end of training."""
    micro_batches = job.sized(micro_batches, 4)
    batch, epochs = job.sized(8, 2), 5 if micro_batches > 4 else 2
    model, at = prepared(job, plug), {}
    model.add_callback("on_train_start", lambda _: at.setdefault("start", (time.perf_counter(), time.process_time())))
    model.add_callback("on_train_end", lambda _: at.setdefault("end", (time.perf_counter(), time.process_time())))
    source = data(job, batch * micro_batches // epochs, 8)
    train(job, model, source, epochs=epochs, batch=batch, nbs=batch, val=True, save=True)
    (clock, cpu), (clock_end, cpu_end) = at["start"], at["end"]
    return {
        "training": clock_end - clock,
        "training_cpu": cpu_end - cpu,
        "before": since_start() - (time.perf_counter() - clock),
    }


def learn(job: Job, plug: Plug = None, bf16: bool = False, target: float = 0.85, **arguments: Any) -> Figures:
    """mAP50 after every epoch, and the seconds of the process at which it first came to the target."""
    model, curve = prepared(job, plug, bf16), []

    def note(trainer: Any) -> None:
        found = float(trainer.metrics.get("metrics/mAP50(B)", 0.0))
        curve.append((since_start(), time.process_time(), found))

    model.add_callback("on_fit_epoch_end", note)
    epochs, batch = job.sized((8, 8), (2, 2))
    source = data(job, job.sized(200, 8), job.sized(60, 4))
    train(
        job, model, source, epochs=epochs, batch=batch, nbs=batch, val=True, seed=job.round, warmup_epochs=1,
        close_mosaic=2, **arguments,
    )  # fmt: skip
    return learnt(curve[:epochs], target)


def learnt(curve: list[tuple[float, float, float]], target: float) -> Figures:
    """Seconds, CPU seconds and the epoch of the first metric at the target; and the last metric."""
    reached = next(((at, cpu, epoch + 1) for epoch, (at, cpu, found) in enumerate(curve) if found >= target), None)
    found: Figures = {"final": curve[-1][2], "curve": [round(metric, 4) for _, _, metric in curve], "all": curve[-1][0]}
    if reached is not None:
        found |= dict(zip(("target", "target_cpu", "epoch"), reached, strict=True))
    return found
