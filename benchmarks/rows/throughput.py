"""Time a sample of the host alone, of what a user would switch on instead, and of the plug. Steps in turn."""

from __future__ import annotations

from functools import partial

from benchmarks.harness import STEP_FIGURES, Contender, Row, Section
from benchmarks.rows import loops, ocr, trainer, yolo

YOLO = tuple(
    Contender(name, function)
    for name, function in {
        "Ultralytics": yolo.steps,
        "Ultralytics, amp=True": partial(yolo.steps, amp=True),
        "Ultralytics, amp=bf16": partial(yolo.steps, amp="bf16"),
        "Ultralytics, bf16 and channels_last by hand": partial(yolo.steps, bf16=True),
        "plug, plan=off compile=off memory_format=host": partial(
            yolo.steps, plug={"plan": "off", "compile": "off", "memory_format": "host"}
        ),
        "plug": partial(yolo.steps, plug={}),
        "plug, precision=auto": partial(yolo.steps, plug={"precision": "auto"}),
    }.items()
)
GROUPED = {"train_sampling_strategy": "group_by_length"}
TRAINER = tuple(
    Contender(name, function)
    for name, function in {
        "Trainer": trainer.steps,
        "Trainer, group_by_length": partial(trainer.steps, **GROUPED),
        "Trainer, bf16=True": partial(trainer.steps, bf16=True),
        "Trainer, group_by_length, bf16=True": partial(trainer.steps, bf16=True, **GROUPED),
        "plug, plan=off compile=off buckets=off": partial(
            trainer.steps, plug={"plan": "off", "compile": "off", "buckets": "off"}
        ),
        "plug": partial(trainer.steps, plug={}),
        "plug, precision=auto": partial(trainer.steps, plug={"precision": "auto"}),
    }.items()
)
YOLO_COMPILED = (
    Contender("Ultralytics", yolo.steps),
    Contender("Ultralytics, compile=True", partial(yolo.steps, compile=True)),
)
TRAINER_COMPILED = (
    Contender("Trainer", trainer.steps),
    Contender("Trainer, torch_compile=True", partial(trainer.steps, torch_compile=True)),
    Contender("Trainer, group_by_length, torch_compile=True", partial(trainer.steps, torch_compile=True, **GROUPED)),
)
LINES = tuple(
    Contender(name, function)
    for name, function in {
        "official EasyOCR step": partial(ocr.steps, name="official"),
        "plug, precision=fp32": partial(ocr.steps, name="plugins, fp32"),
        "plug": partial(ocr.steps, name="plugins, auto"),
    }.items()
)
DOCTR = tuple(
    Contender(name, function)
    for name, function in {
        "docTR's CRNN, plain loop": ocr.doctr,
        "docTR's CRNN, Accelerated": partial(ocr.doctr, plug={}),
        "docTR's CRNN, Accelerated, precision=auto": partial(ocr.doctr, plug={"precision": "auto"}),
        "plug's EasyOCR recognizer, 64 px high, own widths, fp32": partial(ocr.steps, name="plugins, fp32"),
        "plug's EasyOCR recognizer, the same, precision=auto": partial(ocr.steps, name="plugins, auto"),
    }.items()
)

SECTIONS = (
    Section(
        "throughput",
        "Time a sample, against what one would pick instead",
        "Seconds a sample; each contender trains in a process of its own and waits while the others take their turn. "
        "The ratio is that of a turn to the first contender's turn in the same round: below 1 is faster. All of a row "
        "train the same model from the same weights on the same data in fp32, unless the name says otherwise; compile "
        "and trials lie in the warm-up. Memory is the process's peak, warm-up included.\n\n"
        "![CPU time a sample, as ratios](docs/ratios.svg)",
        STEP_FIGURES,
        (
            Row("yolo", "YOLOv8n, 160 px, batch 16, shapes, AdamW, loader in the process", YOLO, steps=(10, 8)),
            Row(
                "trainer", "MiniLM (2 of 6 layers), docstrings up to 128 tokens, batch 16", TRAINER,
                steps=(16, 24), quick_steps=(2, 2),
            ),
            Row("yolo-compile", "YOLOv8n as above; minutes of warm-up", YOLO_COMPILED, steps=(10, 8)),
            Row("trainer-compile", "MiniLM as above; minutes of warm-up", TRAINER_COMPILED, steps=(24, 24)),
            Row(
                "loops", "ResNet-18, 64 px, micro-batch 16 x 2, clip 5, EMA 0.999, SGD: an update", loops.AGAINST,
                steps=(8, 6),
            ),
            Row("lines", "EasyOCR recognizer, lines 64 px high, batch 16, Adadelta", LINES, steps=(3, 6)),
            Row("doctr", "docTR's crnn_vgg16_bn, 32 x 128 px, batch 16, AdamW: the same lines", DOCTR, steps=(3, 6)),
        ),
    ),
)  # fmt: skip
