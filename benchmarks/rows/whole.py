"""Whole processes: to the first update, and short runs of YOLO from start to end."""

from __future__ import annotations

from functools import partial

from benchmarks.harness import Contender, Figure, Row, Section
from benchmarks.rows import loops, ocr, trainer, yolo


def pair(key: str, what: str, host: str, function: object, plug: dict[str, object] | None = None) -> Row:
    """The host alone, and the plug at its defaults."""
    alone, with_plug = Contender(host, function), Contender("plug", partial(function, plug=plug or {}))  # type: ignore
    return Row(key, what, (alone, with_plug))


def contenders(micro_batches: int) -> tuple[Contender, ...]:
    return (
        Contender("Ultralytics", partial(yolo.whole, micro_batches=micro_batches)),
        Contender("plug", partial(yolo.whole, micro_batches=micro_batches, plug={})),
    )


SECTIONS = (
    Section(
        "first",
        "Time to the first update",
        "Seconds from the start of the process to the end of its first update, imports, data set and model included; "
        "whole processes in turn. The plug at its defaults; CPU time is that of the whole process.",
        (Figure("first", "s", ratio="ratio"), Figure("cpu", "CPU s", ratio="ratio of CPU time")),
        (
            pair("first-yolo", "YOLOv8n, 160 px, batch 16", "Ultralytics", yolo.first_update),
            pair("first-trainer", "MiniLM (2 of 6 layers), docstrings, batch 16", "Trainer", trainer.first_update),
            pair("first-loop", "ResNet-18, 64 px, micro-batch 16 x 2", "by hand", loops.first_update),
            Row(
                "first-lines", "EasyOCR recognizer, lines, batch 16",
                (
                    Contender("official EasyOCR step", partial(ocr.first_update, name="official")),
                    Contender("plug", partial(ocr.first_update, name="plugins, auto")),
                ),
            ),
        ),
    ),
    Section(
        "short",
        "Short runs of YOLO, start to end",
        "Whole processes in turn: YOLOv8n, 160 px, batch 8, five epochs with validation and checkpoints, the plug at "
        "its defaults. `before`: until training starts; `training`: from there to its end.",
        (
            Figure("seconds", "s", ratio="ratio"),
            Figure("cpu", "CPU s", ratio="ratio of CPU time"),
            Figure("before", "s before", ratio="ratio"),
            Figure("training", "s training", ratio="ratio"),
            Figure("training_cpu", "CPU s training", ratio="ratio"),
        ),
        (
            Row("short-75", "75 micro-batches", contenders(75)),
            Row("short-250", "250 micro-batches", contenders(250)),
        ),
    ),
)  # fmt: skip
