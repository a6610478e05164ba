"""What training comes to: time to a target metric, and the metric at equal epochs, over seeds."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks.harness import Contender, Figure, Figures, Job, Row, Section, since_start
from benchmarks.rows import trainer, yolo


def docstrings(job: Job, plug: dict[str, Any] | None = None, **arguments: Any) -> Figures:
    """Accuracy on held-out docstrings after every epoch: the demo's small encoder, from scratch."""
    made = trainer.build(
        job, job.sized(960, 16), plug, small=True, seed=job.round, held_out=job.sized(300, 8),
        num_train_epochs=job.sized(6, 2),
        learning_rate=1e-3, warmup_steps=0.1, per_device_eval_batch_size=32, eval_strategy="epoch", **arguments,
    )  # fmt: skip
    curve: list[tuple[float, float, float]] = []
    from transformers import TrainerCallback

    class Note(TrainerCallback):
        def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
            curve.append((since_start(), time.process_time(), metrics["eval_accuracy"]))

    made.add_callback(Note())
    made.train()
    return yolo.learnt(curve, 0.60)


def lines(job: Job, name: str) -> Figures:
    """Word accuracy on held-out lines after every third update: english_g2 goes on from its own weights."""
    import easyocr_speed as speed
    import torch

    from integrations.easyocr.reading import read_lines
    from integrations.easyocr.scoring import score

    updates, every = job.sized((18, 3), (2, 1))
    folder = job.shared / "lines"
    if not folder.is_dir():
        speed.render(folder / "train", job.sized(320, 8), seed=1)
        speed.render(folder / "valid", job.sized(100, 4), seed=2)
    run, steps = speed.contender(
        name, folder, updates, saved_model=speed.stock(), manualSeed=job.round + 1, output=str(job.folder),
        batch_size=job.sized(16, 4),
    )  # fmt: skip
    curve: list[tuple[float, float, float]] = []
    for index in range(updates):
        next(steps)
        if (index + 1) % every == 0:
            run.model.eval()
            readings = read_lines(run.model, run.valid, run.preprocess, run.codec, torch.device("cpu"))
            run.model.train()
            found = score(readings.texts, readings.labels).accuracy
            curve.append((since_start(), time.process_time(), found))
    return yolo.learnt(curve, 0.95)


FIGURES = (
    Figure("target", "s to the target", "{:.1f}", ratio="ratio"),
    Figure("target_cpu", "CPU s to the target", "{:.1f}", ratio="ratio of CPU time"),
    Figure("epoch", "epochs to the target", "{:.0f}"),
    Figure("final", "metric at the end", "{:.3f}"),
)
SECTIONS = (
    Section(
        "quality",
        "Time to a target metric, and the metric at equal epochs",
        "Whole processes in turn, the round's number is the seed; the median of the seeds, least and most. Seconds "
        "count from the start of the process, validation included. A run that does not come to the target has no time "
        "to it. `by hand`: forward and loss in torch's bf16 autocast, which Ultralytics has on CUDA alone.",
        FIGURES,
        (
            Row(
                "quality-shapes", "mAP50 0.85: YOLOv8n from scratch, 160 px, 200 shapes, batch 8, 8 epochs",
                tuple(
                    Contender(name, function)
                    for name, function in {
                        "Ultralytics, fp32": yolo.learn,
                        "Ultralytics, bf16 and channels_last by hand": partial(yolo.learn, bf16=True),
                        "plug, fp32": partial(yolo.learn, plug={}),
                        "plug, precision=auto": partial(yolo.learn, plug={"precision": "auto"}),
                    }.items()
                ),
            ),
            Row(
                "quality-docstrings",
                "accuracy 0.60: BERT of 2 layers, 96 wide, from scratch, 960 docstrings, batch 16, 6 epochs",
                tuple(
                    Contender(name, function)
                    for name, function in {
                        "Trainer, fp32": docstrings,
                        "Trainer, bf16=True": partial(docstrings, bf16=True),
                        "plug, fp32": partial(docstrings, plug={}),
                        "plug, precision=auto": partial(docstrings, plug={"precision": "auto"}),
                    }.items()
                ),
            ),
            Row(
                "quality-lines", "word accuracy 0.95: EasyOCR's english_g2 fine-tuned, batch 16, 18 updates",
                tuple(
                    Contender(name, partial(lines, name=known))
                    for name, known in {
                        "official EasyOCR step, fp32": "official",
                        "plug, fp32": "plugins, fp32",
                        "plug, precision=auto": "plugins, auto",
                    }.items()
                ),
            ),
        ),
    ),
)  # fmt: skip
