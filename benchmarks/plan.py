"""Whole runs with the plug and without it, as ratios of their wall time: what the measured plan is worth.

    python benchmarks/plan.py                              # every row and length: about an hour on 2 cores
    python benchmarks/plan.py --rows blocks --lengths 30   # some of them
    python benchmarks/plan.py --rows yolo --lengths 50 200 --repeats 3

Each side is a process of its own, the sides in turn; the median of the repeats counts. `first` is a run with an empty
cache folder, `again` the same job once more with what the first one learnt. The clock runs from the first batch to
the end of training; imports, data set and the report's page are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("YOLO_OFFLINE", "true")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

LENGTHS = {"blocks": [30, 1000], "yolo": [50, 200, 1000]}  # updates
WANTED = {("blocks", 30): 1.02, ("blocks", 1000): 0.72, ("yolo", 1000): 0.70}  # else 1.02
BATCH = 16  # images of 160 px


class Block(nn.Module):
    """LayerNorm, Linear and gated pointwise operations, residual. [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.value, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        found: Tensor = x + self.out(nn.functional.silu(self.gate(y)) * self.value(y))
        return found


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Trial:
    """A hand-written loop's answer to the planner."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.x = torch.empty(0)

    def loss(self) -> Tensor:
        value: Tensor = self.model(self.x).square().mean()
        return value

    def apply(self, precision: str, memory_format: str) -> None:
        pass

    def bare(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def blocks(plug: bool, updates: int, folder: Path) -> dict[str, Any]:
    """Six residual blocks on [32, 256, 128], a plain loop."""
    from plugins import AccelConfig
    from plugins.core.session import Session

    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = [torch.randn(32, 256, 128) for _ in range(4)]
    began = time.perf_counter()
    if not plug:
        for update in range(updates):
            model(batches[update % 4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began}
    session, trial = Session(AccelConfig(cache_dir=folder / "cache"), "benchmark"), Trial(model)
    session.start_plan(torch.device("cpu"))
    session.model_ready(model, optimizer, device=torch.device("cpu"), micro_batch=32, size=1)
    for update in range(updates):
        trial.x = batches[update % 4]
        session.micro_batch(32)
        session.plan_window(trial, updates - update, trial.x.shape)
        (trial.loss() * session.mean(32)).backward()
        session.backward_done()
        session.idle()
    seconds = time.perf_counter() - began
    session.end(folder)
    return {"seconds": seconds, **figures(folder)}


def yolo(plug: bool, updates: int, folder: Path) -> dict[str, Any]:
    """YOLOv8n from scratch on drawn shapes, 160 px, batch 16; `precision=auto` with the plug."""
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
    return {"seconds": clock[1] - clock[0], **(figures(folder / "run") if plug else {})}


def figures(folder: Path) -> dict[str, Any]:
    """What the run's report says of its plan."""
    data = json.loads((folder / "accel_report.json").read_text())
    return {"plan": data["speed"]["plan"], "why": data["compile"]["reason"], "switches": data["speed"]["switches"]}


def side(row: str, plug: bool, updates: int, folder: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    line = [sys.executable, __file__, "--side", row, "on" if plug else "off", str(updates), str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(row: str, updates: int, repeats: int) -> tuple[list[str], str]:
    """The table's row, and the reason for the compile's part of the plan."""
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "first": [], "again": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:  # a cold cache each time
            for key, plug in (("off", False), ("first", True), ("again", True)):
                runs[key].append(side(row, plug, updates, Path(name)))
    seconds = {key: median(run["seconds"] for run in found) for key, found in runs.items()}
    last, again = runs["first"][-1], runs["again"][-1]
    at = ", ".join(str(switch["update"]) for switch in last["switches"]) or "-"
    wanted = WANTED.get((row, updates), 1.02)
    cells = [
        row,
        str(updates),
        f"{seconds['off']:.1f} s",
        *(f"{seconds[k] / seconds['off']:.3f}" for k in ("first", "again")),
    ]
    plans = last["plan"] if last["plan"] == again["plan"] else f"{last['plan']}; again: {again['plan']}"
    return [*cells, f"<= {wanted:.2f}", plans, at], f"{row}, {updates}: {last['why']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--lengths", nargs="+", type=int, help="updates; default: 30 and 1,000, or 50, 200 and 1,000")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        row, plug, updates, folder = given.side
        print(json.dumps({"blocks": blocks, "yolo": yolo}[row](plug == "on", int(updates), Path(folder))))
        return 0
    from rich.console import Console
    from rich.table import Table

    table, why = Table("row", "updates", "plug off", "first", "again", "wanted", "plan", "switched at"), []
    for row in given.rows:
        for updates in given.lengths or LENGTHS[row]:
            cells, reason = compare(row, updates, given.repeats)
            table.add_row(*cells)
            why.append(reason)
            print(" | ".join(cells), file=sys.stderr, flush=True)
    console = Console()
    console.print(table)
    console.print("\n".join(why))
    console.print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
