"""What the plug costs when it changes nothing: step time and peak memory, as ratios of two things run in turn.

    python benchmarks/yolo_step.py              # YOLOv8n, 320 px, batch 8, compile off; then memory at batch 4 x 4

Steps: one process, the two trainers' loops advanced in turn, a few steps each, so that a drift of the machine's
speed meets both alike; the median step of each. Memory: a process each, the peak of its resident memory on the CPU,
of the allocator on CUDA.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("YOLO_OFFLINE", "true")

import shapes  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from ultralytics import YOLO  # noqa: E402

from plugins.core.system.memory import Peaks  # noqa: E402
from plugins.yolo import attach  # noqa: E402

TURN = 4  # steps of one trainer before the other's turn


class Turns:
    """Lets two training loops, each in its own thread, run strictly in turn; keeps the time of every step."""

    def __init__(self, names: tuple[str, str], steps: int) -> None:
        self.names, self.steps = names, steps
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._turn = threading.Condition()
        self._whose = names[0]
        self._done: set[str] = set()

    def hold(self, name: str, trainer: Any) -> None:
        """Time each step from the batch's arrival to the end of its update, and hand over after a few."""
        preprocess, began = trainer.preprocess_batch, [0.0]

        def arrive(batch: dict[str, Any]) -> dict[str, Any]:
            self._wait(name)
            began[0] = time.perf_counter()
            out: dict[str, Any] = preprocess(batch)
            return out

        def leave(_: Any) -> None:
            taken = self.seconds[name]
            taken.append(time.perf_counter() - began[0])
            if len(taken) >= self.steps:
                trainer.stop = True
            if len(taken) % TURN == 0 or trainer.stop:
                self._hand_over(name)

        trainer.preprocess_batch = arrive
        trainer.add_callback("on_train_batch_end", leave)

    def _wait(self, name: str) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._whose == name or len(self._done) > 0)

    def _hand_over(self, name: str) -> None:
        with self._turn:
            if len(self.seconds[name]) >= self.steps:
                self._done.add(name)
            self._whose = next(n for n in self.names if n != name)
            self._turn.notify_all()


def settings(data: Path, folder: Path, name: str, **given: Any) -> dict[str, Any]:
    return {
        "data": str(data), "project": str(folder), "name": name, "epochs": 100, "plots": False, "val": False,
        "verbose": False, "warmup_epochs": 0, "exist_ok": True, **given,
    }  # fmt: skip


def steps(folder: Path, count: int, size: int, batch: int) -> dict[str, float]:
    """Median seconds a step: the host alone, and with the plug (compile off, one micro-batch an update)."""
    data = shapes.write(folder / "data", 64, 4, size)
    turns = Turns(("host", "plug"), count)

    def run(name: str) -> None:
        model = YOLO("yolov8n.yaml")
        if name == "plug":
            attach(model, compile="off", plan="off", accumulate=1)
        model.add_callback("on_train_start", lambda trainer: turns.hold(name, trainer))
        model.train(**settings(data, folder / "runs", name, imgsz=size, batch=batch, nbs=batch))

    threads = [threading.Thread(target=run, args=(name,)) for name in turns.names]
    threads[0].start()
    time.sleep(1)  # Ultralytics seeds the process's generators at construction
    threads[1].start()
    for thread in threads:
        thread.join()
    return {name: median(taken[TURN:]) for name, taken in turns.seconds.items()}


def peak(folder: Path, name: str, count: int, size: int) -> float:
    """GiB at the peak of a run of `count` micro-batches of 4, in a process of its own."""
    line = [sys.executable, __file__, "--peak", name, "--steps", str(count), "--size", str(size)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=folder)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure_peak(name: str, count: int, size: int) -> float:
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        data = shapes.write(folder / "data", 64, 4, size)
        model, peaks, seen = YOLO("yolov8n.yaml"), [], [0]
        if name == "plug":
            attach(model, compile="off", plan="off", accumulate=4)

        def begin(trainer: Any) -> None:
            peaks.append(Peaks(trainer.device))

        def count_step(trainer: Any) -> None:
            seen[0] += 1
            if seen[0] >= count:
                trainer.stop = True

        def read(trainer: Any) -> None:
            peaks[0].update_done()

        for event, function in (
            ("on_train_start", begin), ("on_train_batch_end", count_step), ("on_train_epoch_end", read)
        ):  # fmt: skip
            model.add_callback(event, function)
        model.train(**settings(data, folder / "runs", name, imgsz=size, batch=4, nbs=4))
        return float(peaks[0].first_gib)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each trainer")
    parser.add_argument("--size", type=int, default=320, help="px")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", choices=("host", "plug"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    if given.peak:
        print(json.dumps(measure_peak(given.peak, given.steps, given.size)))
        return 0
    table = Table("YOLOv8n", "host", "with the plug", "ratio", "wanted")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(given.repeats):
            took = steps(folder, given.steps, given.size, given.batch)
            table.add_row(
                f"step, {given.size} px, batch {given.batch}, compile off",
                f"{took['host']:.4f} s", f"{took['plug']:.4f} s", f"{took['plug'] / took['host']:.4f}", "<= 1.01",
            )  # fmt: skip
        host, plug = peak(folder, "host", 12, given.size), peak(folder, "plug", 12, given.size)
        table.add_row(
            "peak, batch 4 against batch 4 x 4", f"{host:.3f} GiB", f"{plug:.3f} GiB", f"{plug / host:.4f}", "<= 1.05"
        )
    Console().print(table)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
