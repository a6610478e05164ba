"""Fine-tuning an EasyOCR recognizer: the loop of `plugins.easyocr` against the official trainer's step, as ratios.

    python benchmarks/easyocr_speed.py                    # samples/s, and peak memory
    python benchmarks/easyocr_speed.py --what accuracy    # accuracy after the same number of samples

The official step is written anew from its description: every crop padded right to 600 px, fp32, Adadelta, clip 5,
CTC without cuDNN, no buckets. VGG-BiLSTM-CTC, batch 32; the same crops (64 px high, widths lognormal around 150 px)
from the same files, without loader workers. A process each: what one makes of its memory is its own. Speed: a few
steps each in turn, while the others wait, so that a drift of the machine's speed meets all alike; all samples over all
seconds, reading the files included. Memory: the peak of its resident memory less what it held before its first step;
it grows until all widths were met, so give it updates.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from render_lines import line  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from integrations.easyocr.bucketing import WidthBatches  # noqa: E402
from integrations.easyocr.labels import ctc_loss  # noqa: E402
from integrations.easyocr.network import read  # noqa: E402
from integrations.easyocr.optimizer import optimizer  # noqa: E402
from integrations.easyocr.prepare import Prepared, prepare  # noqa: E402
from integrations.easyocr.reading import read_lines  # noqa: E402
from integrations.easyocr.scoring import score  # noqa: E402
from integrations.easyocr.settings import read_settings  # noqa: E402
from integrations.easyocr.stream import loader  # noqa: E402
from plugins.core.checkpoint.rng_state import seed_everything  # noqa: E402
from plugins.core.system.memory import Peaks  # noqa: E402
from plugins.easyocr import _config  # noqa: E402
from plugins.easyocr.training import Run  # noqa: E402

BATCH, LINES, SEED = 32, 2000, 1111
WARM_UP = 3  # steps that are not counted
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
OPTIONS: dict[str, dict[str, Any]] = {
    "plugins, fp32": {"precision": "fp32", "plan": "off"},
    "plugins, auto": {"precision": "auto", "plan": "off"},  # by rule: a few steps are too short to measure it
}
CONTENDERS = ("official", *OPTIONS)
Steps = Generator[int, None, None]  # each `next` is an update, and says how many samples it saw


def render(folder: Path, count: int, seed: int, longest: int = 590) -> Path:
    """Crops 64 px high, widths lognormal around 150 px, and their labels.csv."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = ["filename,words"]
    for number, width in enumerate(rng.lognormal(np.log(150), 0.4, count)):
        width = int(min(max(width, 40), longest))
        label = "".join(rng.choice(list(CHARACTERS), max(1, round(width / 30))))
        line(label, "DejaVuSans", rng).resize((width, 64), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def prepared(data: Path, updates: int, preprocess: str, **more: Any) -> Prepared:
    settings, _ = read_settings(
        {
            "lang_char": CHARACTERS,
            "experiment_name": "speed_net",
            "train_data": str(data / "train"),
            "valid_data": str(data / "valid"),
            "output": str(data / "runs"),
            "batch_size": BATCH,
            "num_iter": updates,
            "preprocess": preprocess,
            "manualSeed": SEED,
            **more,
        }
    )
    seed_everything(settings.manualSeed)
    return prepare(settings)


def official(run: Prepared, updates: int) -> Steps:
    """The official loop."""
    model = run.model.train()
    steps = optimizer(model.parameters(), run.settings)
    batches = WidthBatches(run.lines.widths(), [600], BATCH, seed=run.settings.manualSeed)
    for batch in loader(run.lines, islice(batches.from_position(0), updates), 0):
        loss = ctc_loss(read(model, batch.images), batch.classes, batch.lengths)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.settings.grad_clip)
        steps.step()
        yield len(batch)


def plugged(run: Prepared, options: dict[str, Any], folder: Path | None = None) -> Steps:
    """The loop of `fit`, one update at a time; closed, it leaves its report in `folder`."""
    loop = Run(run, _config(dict(options)), 0, lambda told: None)
    loop.accel.train()
    try:
        for batch in loop._stream():
            loop._micro_batch(batch)
            yield len(batch)
    finally:
        loop.accel.end(folder)


def contender(name: str, data: Path, updates: int, **more: Any) -> tuple[Prepared, Steps]:
    if name == "official":
        run = prepared(data, updates, "official", **more)
        return run, official(run, updates)
    run = prepared(data, updates, "reader", **more)
    return run, plugged(run, OPTIONS[name])


def speed(data: Path, updates: int) -> tuple[dict[str, float], dict[str, float]]:
    """Samples/s of every contender, by the clock and by CPU time, which other work on the machine disturbs less.

    In each round the official loop takes one step and the others three.
    """
    samples, clock, cpu = (dict.fromkeys(CONTENDERS, 0.0) for _ in range(3))
    with ExitStack() as stack:
        turns = {name: stack.enter_context(in_turn(name, data, updates)) for name in CONTENDERS}
        for name in CONTENDERS:
            turns[name](WARM_UP)
        for _ in range(updates // 3):
            for name in CONTENDERS:
                found = turns[name](1 if name == "official" else 3)
                for total, value in zip((samples, clock, cpu), found, strict=True):
                    total[name] += value
    return tuple({name: samples[name] / spent[name] for name in CONTENDERS} for spent in (clock, cpu))  # type: ignore[return-value]


@contextmanager
def in_turn(name: str, data: Path, updates: int) -> Iterator[Callable[[int], list[float]]]:
    """A contender in a process of its own, which waits while others run: so many steps -> samples, s, CPU s."""
    process = subprocess.Popen(
        child(name, "speed", data, updates), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asks, answers = process.stdin, process.stdout

    def turn(steps: int) -> list[float]:
        print(steps, file=asks, flush=True)
        return list(json.loads(answers.readline()))

    try:
        yield turn
    finally:
        asks.close()
        process.wait()


def answer_turns(name: str, data: Path, updates: int) -> None:
    """The other side of `in_turn`."""
    _, steps = contender(name, data, updates + 2 * WARM_UP)
    for count in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        samples = sum(islice(steps, int(count)))
        print(json.dumps([samples, time.perf_counter() - began, time.process_time() - used]), flush=True)
    steps.close()


def memory(name: str, data: Path, updates: int) -> float:
    """GiB that this process needed beyond what it held before its first step."""
    import psutil

    _, steps = contender(name, data, updates)
    before = psutil.Process().memory_info().rss / 2**30
    peaks = Peaks(torch.device("cpu"))
    for _ in islice(steps, updates):
        pass
    peaks.update_done()
    return float(peaks.first_gib or 0.0) - before


def accuracy(name: str, data: Path, updates: int, weights: str) -> float:
    """Held-out word accuracy, each contender in its own preprocessing, after `updates` batches."""
    run, steps = contender(name, data, updates, saved_model=weights)
    for _ in islice(steps, updates):
        pass
    readings = read_lines(run.model, run.valid, run.preprocess, run.codec, torch.device("cpu"))
    return score(readings.texts, readings.labels).accuracy


def child(name: str, what: str, data: Path, updates: int) -> list[str]:
    options = ["--child", name, "--what", what, "--data", str(data), "--updates", str(updates)]
    return [sys.executable, __file__, *options]


def in_a_process(name: str, what: str, data: Path, updates: int) -> float:
    done = subprocess.run(child(name, what, data, updates), check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def stock() -> str:
    import easyocr_en_models

    return str(Path(easyocr_en_models.__file__).parent / "models" / "english_g2.pth")


def show(title: str, found: dict[str, float], form: Callable[[float], str]) -> None:
    table = Table("contender", title, "ratio")
    for name, value in found.items():
        table.add_row(name, form(value), f"{value / found['official']:.2f}" if found["official"] else "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["all", "speed", "memory", "accuracy"], default="all")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    what, updates = arguments.what, arguments.updates
    if arguments.child and what == "speed":
        answer_turns(arguments.child, arguments.data, updates)
    elif arguments.child and what == "memory":
        print(json.dumps(memory(arguments.child, arguments.data, updates)))
    elif arguments.child:
        print(json.dumps(accuracy(arguments.child, arguments.data, updates, stock())))
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder)
            render(data / "train", LINES, seed=1)
            render(data / "valid", 300, seed=2)
            if what in ("all", "speed"):
                clock, cpu = speed(data, updates)
                show("samples/s", clock, "{:.1f}".format)
                show("samples a CPU second", cpu, "{:.1f}".format)
            if what in ("all", "memory"):
                found = {name: in_a_process(name, "memory", data, updates) for name in CONTENDERS}
                show("peak, GiB", found, "{:.2f}".format)
            if what in ("all", "accuracy"):
                found = {name: in_a_process(name, "accuracy", data, updates) for name in CONTENDERS}
                show("accuracy", found, "{:.1%}".format)


if __name__ == "__main__":
    main()
