"""What `checkpointing=on` spares and costs: peak memory of training and step time, as ratios of on to off.

    python benchmarks/checkpointing.py                    # YOLOv8n, MiniLM and the EasyOCR recognizer
    python benchmarks/checkpointing.py --what yolo        # one of them

Memory: a process each, in turn, the peak of its resident memory less what it held before its first step (on CUDA the
allocator's). glibc keeps much of what a step frees, and not the same from run to run; with `--returned` it goes back to
the system at once, so that what is in use counts alone. Steps: one process, a few steps of each in turn, so that a
drift of the machine's speed meets both alike; the median step, by the clock and by CPU time, which other work on the
machine disturbs less. Weights and batches are the same; the last loss shows it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from plugins.core.system import devices  # noqa: E402
from plugins.core.system.memory import Peaks  # noqa: E402
from plugins.loop import Accelerated  # noqa: E402

OFF, ON = "off", "on"
WARM_UP = 2  # steps that are not timed: the first window chooses the blocks
RETURNED = 2**18  # bytes, from which on glibc gives a freed block back at once
TURN = 2  # steps of one before the other's turn
SETTINGS: dict[str, Any] = {"compile": "off", "plan": "off", "precision": "host", "memory_format": "host"}
Step = Callable[[], float]


def yolo(size: int = 320, batch: int = 16) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """YOLOv8n with its own loss."""
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG

    model = DetectionModel("yolov8n.yaml", ch=3, nc=4, verbose=False)
    model.args = DEFAULT_CFG
    boxes = torch.rand(2 * batch, 4) * 0.5 + 0.25
    given = {
        "img": torch.rand(batch, 3, size, size),
        "cls": torch.zeros(2 * batch, 1),
        "bboxes": boxes,
        "batch_idx": torch.arange(2 * batch) // 2,
    }
    return model, lambda m: m(placed(given))[0].sum(), batch


def minilm(length: int = 256, batch: int = 16) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """MiniLM's encoder (6 layers, 384 wide) with a head of 2 classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    words = torch.randint(1000, 30000, (batch, length))
    given = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.arange(batch) % 2}
    return BertForSequenceClassification(config), lambda m: m(**placed(given)).loss, batch


def recognizer(width: int = 320, batch: int = 16) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """EasyOCR's VGG-BiLSTM-CTC network of 256 channels, crops 64 px high."""
    from easyocr.model.vgg_model import Model

    frames = width // 4 - 1
    images, classes = torch.rand(batch, 1, 64, width), torch.randint(1, 97, (batch, 12))
    lengths = torch.full((batch,), 12)

    def loss(model: nn.Module) -> Tensor:
        found = model(placed(images), None).float().log_softmax(2).transpose(0, 1)
        given = torch.full((batch,), frames)
        return nn.functional.ctc_loss(found, placed(classes), given, lengths, zero_infinity=True)

    return Model(1, 256, 256, 97), loss, batch


JOBS = {"yolo": yolo, "minilm": minilm, "recognizer": recognizer}
NAMES = {
    "yolo": "YOLOv8n, 320 px, batch 16",
    "minilm": "MiniLM, 256 tokens, batch 16",
    "recognizer": "EasyOCR recognizer, 64 x 320 px, batch 16",
}


def placed(value: Any) -> Any:
    """On this machine's device."""
    if isinstance(value, dict):
        return {key: placed(item) for key, item in value.items()}
    return value.to(devices.own())


def contender(job: str, checkpointing: str) -> tuple[Accelerated, Step]:
    """A training with and without; each call of the function is one step, and returns its loss."""
    torch.manual_seed(0)
    model, loss_of, batch = JOBS[job]()
    model = model.to(devices.own())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    accel = Accelerated(
        model, optimizer, micro_batch=batch, say=lambda line: None, checkpointing=checkpointing, **SETTINGS
    )
    accel.train()

    def step() -> float:
        loss = loss_of(model)
        accel.backward(loss, weight=batch)
        return float(loss.detach())

    return accel, step


def peak(job: str, checkpointing: str, count: int, returned: bool) -> dict[str, Any]:
    """GiB of training, and of the whole process, in a process of its own."""
    line = [sys.executable, __file__, "--what", job, "--peak", checkpointing, "--steps", str(count)]
    own = {"MALLOC_MMAP_THRESHOLD_": str(RETURNED)} if returned else {}
    done = subprocess.run(line, capture_output=True, text=True, check=True, env={**os.environ, **own})
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure_peak(job: str, checkpointing: str, count: int) -> dict[str, Any]:
    accel, step = contender(job, checkpointing)
    device = devices.own()
    before = 0.0 if devices.peak(device) is not None else psutil.Process().memory_info().rss / 2**30
    peaks = Peaks(device)
    losses = [step() for _ in range(count)]
    peaks.update_done()
    whole = float(peaks.first_gib or 0.0)
    facts = accel.session.checkpointing.standing
    accel.end()
    return {"training": whole - before, "whole": whole, "loss": losses[-1], "facts": facts}


def steps(job: str, count: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, by the clock and of CPU time."""
    made = {name: contender(job, name) for name in (OFF, ON)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _, step in made.values():
        for _ in range(WARM_UP):
            step()
    while any(len(found) < count for found in taken.values()):
        for name, (_, step) in made.items():
            for _ in range(TURN):
                clock, cpu = time.perf_counter(), time.process_time()
                step()
                devices.synchronize(devices.own())
                taken[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    for accel, _ in made.values():
        accel.end()
    return {name: (median(c for c, _ in found), median(p for _, p in found)) for name, found in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("all", *JOBS), default="all")
    parser.add_argument("--figure", choices=("both", "memory", "step"), default="both")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each for memory; the median is shown")
    parser.add_argument("--returned", action="store_true", help="memory: freed blocks go back to the system at once")
    parser.add_argument("--peak", choices=(OFF, ON), help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    if given.peak:
        print(json.dumps(measure_peak(given.what, given.peak, given.steps)))
        return 0
    table = Table("training of", "figure", "off", "on", "ratio", "wanted")
    for job in JOBS if given.what == "all" else (given.what,):
        if given.figure != "step":
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in (OFF, ON)}
            for _ in range(given.repeats):
                for name in found:
                    found[name].append(peak(job, name, WARM_UP + 2, given.returned))
            for figure, what, wanted in (
                ("training", "peak memory of training", "<= 0.60"), ("whole", "of the process", "")
            ):  # fmt: skip
                off, on = (median(run[figure] for run in found[name]) for name in (OFF, ON))
                table.add_row(NAMES[job], what, f"{off:.3f} GiB", f"{on:.3f} GiB", f"{on / off:.2f}", wanted)
            losses = {run["loss"] for runs in found.values() for run in runs}
            table.add_row(NAMES[job], "last loss", f"{min(losses):.9g}", f"{max(losses):.9g}", "", "equal")
            print(found[ON][0]["facts"])
        if given.figure != "memory":
            took = steps(job, given.steps)
            for place, (what, wanted) in enumerate((("step", "<= 1.35"), ("step, CPU time", ""))):
                off, on = took[OFF][place], took[ON][place]
                table.add_row(NAMES[job], what, f"{off:.3f} s", f"{on:.3f} s", f"{on / off:.2f}", wanted)
    Console(width=140).print(table)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
