"""What benchmarks/plan.py runs, a function a row: (with the plug, updates, folder) -> seconds and the report's plan,
and `updates` where it ran another number of them.

Of a row's sides in one folder the second run of the plug finds what the first one learnt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from plugins.bench import Gated  # noqa: E402

Found = dict[str, Any]
BATCH = 16  # images of 160 px; docstrings


class Products(nn.Module):
    """The same with three Linears, whose matrix products are most of a step. [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.value, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        found: Tensor = x + self.out(nn.functional.silu(self.gate(y)) * self.value(y))
        return found


class Blocks(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Gated) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def blocks(
    plug: bool, updates: int, folder: Path, kind: Callable[[], nn.Module] = Gated, precision: str = "host"
) -> Found:
    """Six residual blocks on [32, 256, 128], a hand-written loop."""
    from plugins.loop import Accelerated

    torch.manual_seed(0)
    model = Blocks(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = [torch.randn(32, 256, 128) for _ in range(4)]
    began = time.perf_counter()
    if not plug:
        for update in range(updates):
            model(batches[update % 4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began}
    accel = Accelerated(model, optimizer, tunes=True, precision=precision, cache_dir=folder / "cache")
    for update in range(updates):
        x = batches[update % 4]
        accel.tune(lambda x=x: model(x).square().mean(), updates - update, x.shape)  # type: ignore[misc]
        with accel.forward(x) as x:
            loss = model(x).square().mean()
        accel.backward(loss, weight=32)
    seconds = time.perf_counter() - began
    accel.end(folder)
    return {"seconds": seconds, **figures(folder)}


def ready(plug: bool, updates: int, folder: Path) -> Found:
    """The same blocks at compile=on, regional: seconds that the first update takes more than a later one."""
    from plugins.loop import Accelerated

    torch.manual_seed(0)
    model = Blocks()
    x = torch.randn(32, 256, 128)
    accel = Accelerated(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), compile="on", compile_scope="regional",
        cache_dir=folder / "cache",
    )  # fmt: skip
    at = [time.perf_counter()]
    for _ in range(4):
        with accel.forward(x):
            loss = model(x).square().mean()
        accel.backward(loss, weight=32)
        at.append(time.perf_counter())
    accel.end()
    return {"seconds": (at[1] - at[0]) - (at[4] - at[3])}


def yolo(plug: bool, updates: int, folder: Path) -> Found:
    """YOLOv8n from scratch on drawn shapes, 160 px, batch 16, whole epochs of 25; `precision=auto` with the plug."""
    import shapes
    from ultralytics import YOLO

    from plugins.yolo import attach

    epochs = max(updates // 25, 1)
    data = shapes.write(folder / "data", BATCH * 25, 8, 160)
    model, clock = YOLO("yolov8n.yaml"), [0.0, 0.0]
    if plug:
        attach(model, precision="auto", accumulate=1, cache_dir=folder / "cache")
    model.add_callback("on_train_start", lambda _: clock.__setitem__(0, time.perf_counter()))
    model.add_callback("on_train_end", lambda _: clock.__setitem__(1, time.perf_counter()))
    model.train(
        data=str(data), epochs=epochs, batch=BATCH, nbs=BATCH, imgsz=160, project=str(folder), name="run",
        exist_ok=True, optimizer="AdamW", lr0=0.002, plots=False, val=False, save=False, verbose=False, workers=2,
        amp=False,
    )  # fmt: skip
    seconds = clock[1] - clock[0]
    return {"seconds": seconds, "updates": 25 * epochs, **(figures(folder / "run") if plug else {})}


def minilm(plug: bool, updates: int, folder: Path) -> Found:
    """MiniLM-L6 learns the packages of 768 docstrings of up to 256 tokens; `precision=auto` and buckets with the plug,
    the stock Trainer's own order and padding without."""
    import docstrings
    import hf_speed
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, set_seed

    from plugins.hf import AccelCallback

    text, labels = hf_speed.texts(768)
    set_seed(0)
    tokenizer, model = docstrings.encoder(hf_speed.real_encoder() or None, text)
    tokens = tokenizer(text, truncation=True, max_length=256)
    steps = hf_speed.Steps()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "run"), max_steps=updates, per_device_train_batch_size=BATCH, learning_rate=5e-5,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({**tokens, "labels": labels}),
        processing_class=tokenizer,
        callbacks=[*([AccelCallback(precision="auto", cache_dir=folder / "cache")] if plug else []), steps],
    )  # fmt: skip
    trainer.train()
    return {"seconds": steps.at[-1] - steps.at[0], **(figures(folder / "run") if plug else {})}


def ocr(plug: bool, updates: int, folder: Path) -> Found:
    """VGG-BiLSTM-CTC on crops around 150 px wide, batch 32: `fit`'s loop against the official trainer's step."""
    import easyocr_speed as speed

    data, options = folder / "data", {"cache_dir": folder / "cache"}
    if not data.is_dir():
        speed.render(data / "train", speed.LINES, seed=1)
        speed.render(data / "valid", speed.BATCH, seed=2)
    run = speed.prepared(data, updates, "reader" if plug else "official")
    steps = speed.plugged(run, options, folder) if plug else speed.official(run, updates)
    began = time.perf_counter()
    for _ in islice(steps, updates):
        pass
    seconds = time.perf_counter() - began
    steps.close()
    return {"seconds": seconds, **(figures(folder) if plug else {})}


def figures(folder: Path) -> Found:
    """What the run's report says of its plan."""
    data = json.loads((folder / "accel_report.json").read_text())
    return {"plan": data["speed"]["plan"], "why": data["compile"]["reason"], "switches": data["speed"]["switches"]}


ROWS: dict[str, Callable[[bool, int, Path], Found]] = {
    "blocks": blocks,
    "products": partial(blocks, kind=Products),
    "products_auto": partial(blocks, kind=Products, precision="auto"),
    "ready": ready,
    "yolo": yolo,
    "minilm": minilm,
    "ocr": ocr,
}
