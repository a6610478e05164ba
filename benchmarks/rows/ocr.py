"""Recognizers of text lines: the official EasyOCR step, `plugins.easyocr`, and docTR's CRNN."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, Job, Skip, since_start


def data(job: Job, count: int, name: str = "data") -> Path:
    """A folder of `count` drawn lines to train on and some to validate, written once for the row."""
    import easyocr_speed as speed

    folder = job.shared / f"{name}-{count}"
    if not folder.is_dir():
        speed.render(folder / "train", count, seed=1)
        speed.render(folder / "valid", job.sized(speed.BATCH, 4), seed=2)
    return folder


def steps(job: Job, name: str) -> None:
    """`name`: of benchmarks/easyocr_speed.py, `official` or one of the plug's."""
    import easyocr_speed as speed

    _, updates = speed.contender(
        name, data(job, job.sized(640, 16)), 100_000, batch_size=job.sized(16, 4), output=str(job.folder)
    )
    for samples in updates:
        job.step(samples)


def doctr(job: Job, plug: dict[str, Any] | None = None) -> None:
    """docTR's CRNN (VGG16, BiLSTM, CTC) at its fixed 32 x 128 px, as its reference training: AdamW, clip 5.

    With `plug`: the same model, loss and batches in `Accelerated`.
    """
    import torch

    try:
        from doctr.models.recognition import crnn_vgg16_bn
    except ImportError as error:
        raise Skip(f"{error}: pip install 'accel-plugins[bench]'") from None
    import numpy as np
    from PIL import Image

    from plugins.loop import Accelerated

    batch = job.sized(16, 4)
    folder = data(job, job.sized(640, 16)) / "train"
    rows = [row.split(",", 1) for row in (folder / "labels.csv").read_text().splitlines()[1:]]
    torch.manual_seed(0)
    model = crnn_vgg16_bn(pretrained=False, pretrained_backbone=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"clip_norm": 5.0, "cache_dir": job.folder / "cache", **(plug or {})}
    accel = Accelerated(model, optimizer, micro_batch=batch, **options) if plug is not None else None

    def read(name: str) -> Any:
        picture = Image.open(folder / name).convert("RGB").resize((128, 32))  # its default: stretched to the size
        return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255

    index = 0
    while True:
        chosen = [rows[(index + at) % len(rows)] for at in range(batch)]
        index += batch
        images, labels = torch.stack([read(name) for name, _ in chosen]), [label for _, label in chosen]
        if accel is not None:
            with accel.forward(images) as images:
                loss = model(images, labels)["loss"]
            accel.backward(loss, weight=batch)
        else:
            loss = model(images, labels)["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
        job.step(batch)


def first_update(job: Job, name: str) -> Figures:
    """Seconds of the process up to its first update."""
    import easyocr_speed as speed

    _, updates = speed.contender(
        name, data(job, job.sized(640, 16)), 200, batch_size=job.sized(16, 4), output=str(job.folder)
    )
    next(updates)
    found = {"first": since_start()}
    updates.close()
    return found


def epoch(job: Job, times: int) -> Figures:
    """One epoch of the plug over so many times the data."""
    import easyocr_speed as speed

    count, batch = job.sized(160, 8) * times, job.sized(16, 4)
    folder = data(job, count)
    run = speed.prepared(folder, count // batch, "reader", batch_size=batch, output=str(job.folder))
    updates = speed.plugged(run, {"precision": "fp32", "plan": "off", "compile": "off"}, job.folder)
    list(islice(updates, 1))  # which holds what happens once a run
    began, used = time.perf_counter(), time.process_time()
    samples = sum(islice(updates, count // batch - 1))
    found = {
        "seconds": (time.perf_counter() - began) / samples, "cpu_sample": (time.process_time() - used) / samples,
    }  # fmt: skip
    updates.close()  # which writes the report
    report = json.loads((job.folder / "accel_report.json").read_text())
    found["graphs"] = len(report["shapes"]["seen"])
    return found
