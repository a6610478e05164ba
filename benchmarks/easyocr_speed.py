"""Fine-tuning an EasyOCR recognizer: the loop of `plugins.easyocr` against the official trainer's step, as ratios.

    python benchmarks/easyocr_speed.py                    # samples/s and peak memory, VGG-BiLSTM-CTC, batch 32
    python benchmarks/easyocr_speed.py --what accuracy    # accuracy after the same number of samples

The official step is written anew from its description: every crop padded right to 600 px, fp32, Adadelta, clip 5,
CTC without cuDNN, no buckets. Both read the same crops (64 px high, widths lognormal around 150 px) from the same
files, without loader workers. Each contender runs in a process of its own, in turn, so that a drift of the machine's
speed meets all alike; the median of the rounds counts. Memory is the peak of the resident memory, less what the
process held before its training began.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from render_lines import line  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

BATCH = 32
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
CONTENDERS = {
    "official": None,
    "plugins, fp32": {"precision": "fp32"},
    "plugins, auto": {"precision": "auto"},
}


def render(folder: Path, count: int, seed: int) -> None:
    """Crops 64 px high, widths lognormal around 150 px, and their labels.csv."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = ["filename,words"]
    for number, width in enumerate(rng.lognormal(np.log(150), 0.4, count)):
        width = int(min(max(width, 40), 590))
        label = "".join(rng.choice(list(CHARACTERS), max(1, round(width / 30))))
        line(label, "DejaVuSans", rng).resize((width, 64), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def settings(data: Path, output: Path, updates: int) -> dict[str, Any]:
    return {
        "lang_char": CHARACTERS,
        "experiment_name": "speed_net",
        "train_data": str(data / "train"),
        "valid_data": str(data / "valid"),
        "output": str(output),
        "batch_size": BATCH,
        "num_iter": updates,
        "valInterval": updates,
        "tensorboard": False,
        "progress": False,
    }


def official(data: Path, output: Path, updates: int) -> dict[str, float]:
    """The official loop; reads its held-out crops at 600 px as its own validation does."""
    from integrations.easyocr.batches import WidthBatches
    from integrations.easyocr.labels import ctc_loss
    from integrations.easyocr.network import read
    from integrations.easyocr.optim import optimizer
    from integrations.easyocr.prepare import prepare
    from integrations.easyocr.reading import read_lines
    from integrations.easyocr.scoring import score
    from integrations.easyocr.settings import read_settings
    from integrations.easyocr.stream import loader
    from plugins.core.checkpoint import seed_everything
    from plugins.core.memory import Peaks

    chosen, _ = read_settings({**settings(data, output, updates), "preprocess": "official"})
    seed_everything(chosen.manualSeed)
    run = prepare(chosen)
    model, steps = run.model.train(), optimizer(run.model.parameters(), chosen)
    batches = WidthBatches(run.lines.widths(), [600], BATCH, seed=chosen.manualSeed)
    peaks, before = Peaks(torch.device("cpu")), resident()
    began, samples = time.perf_counter(), 0
    for batch in loader(run.lines, islice(batches.from_position(0), updates), 0):
        loss = ctc_loss(read(model, batch.images), batch.classes, batch.lengths)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.grad_clip)
        steps.step()
        samples += len(batch)
        float(loss)  # it averages the loss over its log interval
    seconds = time.perf_counter() - began
    peaks.update_done()
    readings = read_lines(model, run.valid, run.preprocess, run.codec, torch.device("cpu"))
    return {
        "samples_per_second": samples / seconds,
        "peak_gib": (peaks.first_gib or 0.0) - before,
        "accuracy": score(readings.texts, readings.labels).accuracy,
    }


def plugged(data: Path, output: Path, updates: int, options: dict[str, Any]) -> dict[str, float]:
    """`fit` with its defaults; the report's peaks are of the updates and the validation after them."""
    import easyocr.easyocr  # noqa: F401  # so that `before` counts what both contenders import

    from plugins.easyocr import fit

    before = resident()
    result = fit(settings(data, output, updates), say=lambda _: None, **options)
    report = json.loads(Path(str(result.report)).read_text(encoding="utf-8"))
    return {
        "samples_per_second": result.history[-1].samples_per_second,
        "peak_gib": max(v for k, v in report["memory"].items() if k != "kind") - before,
        "accuracy": result.history[-1].accuracy,
    }


def resident() -> float:
    """Resident memory of this process now, in GiB."""
    import psutil

    return float(psutil.Process().memory_info().rss / 2**30)


def child(name: str, data: Path, updates: int) -> dict[str, float]:
    """One contender in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, "--data", str(data), "--updates", str(updates)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["speed", "accuracy"], default="speed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=12, help="updates of each contender; accuracy wants about 400")
    parser.add_argument("--child", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        options = CONTENDERS[arguments.child]
        with tempfile.TemporaryDirectory() as output:
            if options is None:
                found = official(arguments.data, Path(output), arguments.updates)
            else:
                found = plugged(arguments.data, Path(output), arguments.updates, options)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        data, accuracy = Path(folder), arguments.what == "accuracy"
        render(data / "train", 4000 if accuracy else BATCH * arguments.updates, seed=1)
        render(data / "valid", 300 if accuracy else BATCH, seed=2)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for _ in range(1 if accuracy else arguments.rounds):
            for name, results in rounds.items():
                results.append(child(name, data, arguments.updates))
                print(name, results[-1], flush=True)
    table = Table("contender", "samples/s", "ratio", "peak, GiB", "ratio", "accuracy")
    first: dict[str, float] = {}
    for name, results in rounds.items():
        middle = {key: median(result[key] for result in results) for key in results[0]}
        first = first or middle
        table.add_row(
            name,
            f"{middle['samples_per_second']:.1f}",
            f"{middle['samples_per_second'] / first['samples_per_second']:.2f}",
            f"{middle['peak_gib']:.2f}",
            f"{middle['peak_gib'] / first['peak_gib']:.2f}",
            f"{middle['accuracy']:.1%}" if accuracy else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
