"""What the plug is for, measured: the host alone against the host with the plug, on tiny data, on this machine.

    python examples/why.py            # a few minutes on 2 CPU cores; prints one table

Every row runs the real host twice. Nothing here is a stand-in but the faults themselves (a NaN, a compiler that
raises, a kill).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout that is not installed works too
os.environ.setdefault("YOLO_OFFLINE", "true")

import shapes  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402
from ultralytics import YOLO  # noqa: E402

from plugins.yolo import attach  # noqa: E402

Row = tuple[str, str, str]
PLAIN = {
    "imgsz": 64, "epochs": 1, "plots": False, "val": False, "verbose": False, "optimizer": "SGD", "lr0": 0.01,
    "mosaic": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "translate": 0.0, "scale": 0.0, "fliplr": 0.0,
    "erasing": 0.0, "auto_augment": None, "seed": 0, "exist_ok": True,
}  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


class Bench:
    """A folder with tiny data sets, and runs of the host on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.detect = shapes.write(folder / "detect", 16, 4, 64)
        for index in (4, 5, 6, 7):  # the second micro-batch of four holds no object
            (folder / "detect" / "labels" / "train" / f"{index:04}.txt").write_text("")
        self.classify = shapes.write(folder / "classify", 16, 4, 64, task="classify")

    def train(self, plug: dict[str, Any] | None, task: str = "detect", **given: Any) -> Any:
        """Train YOLOv8n, with the plug where `plug` holds its settings; callbacks in `given` under `on`."""
        callbacks = given.pop("on", {})
        model = YOLO({"detect": "yolov8n.yaml", "classify": "yolov8n-cls.yaml"}[task])
        if plug is not None:
            attach(model, **plug)
        for event, function in callbacks.items():
            model.add_callback(event, function)
        data = {"detect": self.detect, "classify": self.classify}[task]
        model.train(data=str(data), project=str(self.folder / "runs"), **{**PLAIN, "name": task, **given})
        return model

    def gradient(self, plug: dict[str, Any] | None, task: str, batch: int) -> Tensor:
        """The gradient of the run's one update, before clipping, BatchNorm held at its first statistics."""
        found: list[Tensor] = []

        def prepare(trainer: Any) -> None:
            trainer.train_loader.batch_sampler.sampler.sampler = SequentialSampler(trainer.train_loader.dataset)
            step = trainer.optimizer_step

            def keep() -> None:
                found.append(flat(trainer.model))
                step()

            if plug is None:
                trainer.optimizer_step = keep
            else:
                inner = trainer.optimizer.step
                trainer.optimizer.step = lambda *a: (found.append(flat(trainer.model)), inner(*a))[1]

        def hold(trainer: Any) -> None:
            for module in trainer.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

        settings = None if plug is None else {**plug, "clip_norm": "off"}
        self.train(settings, task, batch=batch, nbs=16, on={"on_train_start": prepare, "on_train_batch_start": hold})
        return found[-1]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().flatten() for p in model.parameters() if p.grad is not None])


def big_batch(bench: Bench, task: str) -> Row:
    right = bench.gradient(None, task, 16)
    host, ours = bench.gradient(None, task, 4), bench.gradient({"accumulate": 4}, task, 4)

    def off(found: Tensor) -> str:
        return f"{found.norm() / right.norm():.3g}x the norm, {(found - right).norm() / right.norm():.1e} off"

    return f"16 images as 4 x 4 against 1 x 16: gradient ({task})", off(host), off(ours)


def not_a_number(bench: Bench) -> Row:
    def lost(plug: dict[str, Any] | None) -> str:
        def poison(trainer: Any) -> None:
            preprocess, seen = trainer.preprocess_batch, [0]

            def once(batch: dict[str, Any]) -> dict[str, Any]:
                batch = preprocess(batch)
                seen[0] += 1
                return {**batch, "img": batch["img"] * float("nan")} if seen[0] == 2 else batch

            trainer.preprocess_batch = once

        def count(trainer: Any) -> None:
            tensors = [t for t in trainer.model.state_dict().values() if t.is_floating_point()]
            found.append(f"{sum(not bool(t.isfinite().all()) for t in tensors)} of {len(tensors)} tensors lost")

        found: list[str] = []
        bench.train(plug, batch=4, nbs=4, on={"on_train_start": poison, "on_train_epoch_end": count})
        return found[-1]

    return "one NaN micro-batch", lost(None), lost({})


def compiler_raises(bench: Bench) -> Row:
    """A C++ compiler that fails at its first real file, as a broken tool chain does."""
    broken = bench.folder / "broken-c++"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "g++ 12.2"; exit 0;; esac\nexit 1\n')
    broken.chmod(0o755)

    def end(plug: dict[str, Any] | None, **given: Any) -> str:
        try:
            # CXX is read when inductor is imported, which has happened by now
            with tempfile.TemporaryDirectory() as cache, inductor.patch({"cpp.cxx": (None, str(broken))}):
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                bench.train(plug, batch=16, **given)
            return "trains eagerly, one warning"
        except Exception as error:
            return f"run dies: {type(error).__name__}"
        finally:
            torch._dynamo.reset()

    return "a compiler that raises", end(None, compile=True), end({"compile": "on"})


def resumed(bench: Bench) -> Row:
    def difference(plug: dict[str, Any] | None) -> str:
        weights: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[Any], None]:
            return lambda trainer: weights.update(
                {name: torch.cat([p.detach().flatten() for p in trainer.model.parameters()])}
            )

        class Cut(Exception):
            pass

        def cut(trainer: Any) -> None:
            if trainer.epoch == 1:
                raise Cut

        given = {"batch": 4, "epochs": 4, "mosaic": 1.0, "close_mosaic": 1, "nbs": 8}
        bench.train(plug, name="straight", on={"on_train_end": keep("straight")}, **given)
        with contextlib.suppress(Cut):
            bench.train(plug, name="cut", on={"on_fit_epoch_end": cut}, **given)
        model = YOLO(bench.folder / "runs" / "cut" / "weights" / "last.pt")
        if plug is not None:
            attach(model)
        model.add_callback("on_train_end", keep("resumed"))
        model.train(resume=True)
        off = float((weights["resumed"] - weights["straight"]).norm() / weights["straight"].norm())
        return "equal, bit for bit" if off == 0 else f"weights {off:.1e} off"

    return "4 epochs against 2 + resume 2", difference(None), difference({"accumulate": 2})


SAVER = """
import sys
from pathlib import Path
import torch
from ultralytics import YOLO
from plugins.yolo import attach
model = YOLO("yolov8n.yaml")
if sys.argv[2] == "plug":
    attach(model, accumulate=1)
def save_on(trainer):
    print("saving", flush=True)
    while True:
        trainer.save_model()
model.add_callback("on_model_save", save_on)
model.train(data=sys.argv[1], project=sys.argv[3], name=sys.argv[2], imgsz=64, epochs=1, batch=16, plots=False,
            val=False, verbose=False, exist_ok=True)
"""


def killed(bench: Bench, times: int = 6) -> Row:
    def broken(kind: str) -> str:
        lost = 0
        last = bench.folder / "kill" / kind / "weights" / "last.pt"
        for attempt in range(times):
            run = subprocess.Popen(
                [sys.executable, "-c", SAVER, str(bench.detect), kind, str(bench.folder / "kill")],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
            )  # fmt: skip
            assert run.stdout is not None
            next((line for line in run.stdout if line.startswith("saving")), None)
            # Aim where the file is being rewritten: the host truncates it first, so it is short then.
            until, full = time.monotonic() + 3 + attempt / 10, last.stat().st_size
            while time.monotonic() < until and last.stat().st_size >= full:
                pass
            run.send_signal(signal.SIGKILL)
            run.wait()
            try:
                torch.load(last, weights_only=False, map_location="cpu")
            except Exception:
                lost += 1
        return f"last.pt lost in {lost} of {times}"

    return f"killed while saving, {times} times", broken("host"), broken("plug")


def clipping(bench: Bench) -> Row:
    def norm(plug: dict[str, Any] | None) -> str:
        norms: list[float] = []

        def spy(trainer: Any) -> None:
            step = trainer.optimizer.step
            trainer.optimizer.step = lambda *a: (norms.append(float(flat(trainer.model).norm())), step(*a))[1]

        bench.train(plug, batch=4, nbs=4, on={"on_train_start": spy})
        return f"norm at the step at most {max(norms):.3g}"

    return "clip at 0.1, once an update", norm(None) + " (fixed at 10)", norm({"clip_norm": 0.1})


def command(bench: Bench) -> Row:
    """The host's command with `callbacks=`, as users type it."""

    def run(module: list[str]) -> str:
        line = [
            *module, "train", "model=yolov8n.yaml", f"data={bench.detect}", "imgsz=64", "epochs=1", "batch=16",
            "plots=False", f"project={bench.folder / 'runs'}", "name=command", "exist_ok=True",
            "callbacks=plugins.yolo",
        ]  # fmt: skip
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        return "trains with it" if done.returncode == 0 else "refused: not a valid YOLO argument"

    host = [sys.executable, "-c", "from ultralytics.cfg import entrypoint; entrypoint()"]
    return "callbacks= on the command line", run(host), run([sys.executable, "-m", "plugins.yolo"])


ROWS: dict[str, Callable[[Bench], Row]] = {
    "detect": lambda bench: big_batch(bench, "detect"),
    "classify": lambda bench: big_batch(bench, "classify"),
    "nan": not_a_number,
    "compiler": compiler_raises,
    "resume": resumed,
    "kill": killed,
    "clip": clipping,
    "command": command,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"some of: {', '.join(ROWS)}, hf (default: all)")
    wanted = parser.parse_args().rows or [*ROWS, "hf"]
    if unknown := [row for row in wanted if row not in (*ROWS, "hf")]:
        print(f"rows={unknown[0]}: unknown; allowed are {', '.join(ROWS)}, hf", file=sys.stderr)
        return 1
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    table = Table("", "the host alone", "with the plug")
    with tempfile.TemporaryDirectory() as folder, Live(table, console=Console()) as live:
        bench = Bench(Path(folder))
        rows: Iterable[Row] = (ROWS[name](bench) for name in wanted if name != "hf")
        if "hf" in wanted:
            import why_hf

            rows = chain(rows, why_hf.rows())
        for row in rows:
            table.add_row(*row)
            live.refresh()
    return 0


if __name__ == "__main__":
    sys.exit(main())
