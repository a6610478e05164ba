"""What this project promises, measured on a CUDA machine in a few minutes; prints one table.

    python examples/gpu_check.py            # on a machine without CUDA it says so, and ends well

Rows: accumulation through CUDA graphs, from the start and from a plan, keeps gradients; a skipped step under the
gradient scaler; memory of the first step and of the steady ones; how fast blocks compile, cold, beside a run and warm;
what plan a run chooses, and whether CUDA graphs were among the candidates.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.workloads import Blocks  # noqa: E402
from plugins import AccelConfig  # noqa: E402
from plugins.core.plan import Plan  # noqa: E402
from plugins.core.planfile import Switch, write_switches  # noqa: E402
from plugins.core.session import Session  # noqa: E402

Row = tuple[str, str, str]  # what, measured, wanted
DEVICE = torch.device("cuda")
WIDTH = 128


class Loop:
    """A plain loop on the GPU: blocks of `depth` micro-batches an update, with a session or without."""

    host_precision = "fp32"

    def __init__(self, precision: str = "fp32", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Blocks().to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if precision == "fp16" else None
        self.precision, self.options = precision, options
        self.x = torch.empty(0)

    def loss(self) -> Tensor:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        inside = torch.autocast(DEVICE.type, dtype=kinds[self.precision]) if self.precision in kinds else nullcontext()
        with inside:
            value: Tensor = self.model(self.x).float().square().mean()
            return value

    def apply(self, precision: str, memory_format: str) -> None:
        self.precision = precision if precision != "host" else self.precision

    def bare(self) -> Any:
        return nullcontext()

    def session(self, folder: Path, size: int = 1) -> Session:
        options = {"plan": "off", "compile": "off", "cache_dir": folder / "cache", **self.options}
        made = Session(AccelConfig(precision=self.precision, **options), "check", say=lambda text: None)
        made.start_plan(DEVICE)
        made.model_ready(self.model, self.optimizer, device=DEVICE, micro_batch=32, size=size, scaler=self.scaler)
        return made

    def micro_batch(self, held: Session, x: Tensor, left: int) -> Any:
        self.x, first = x, held.window.empty
        held.micro_batch(len(x))
        if first:
            held.plan_window(self, left, x.shape)
        loss = self.loss() * held.mean(len(x))
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        outcome = held.backward_done()
        held.idle()
        return outcome


def batches(count: int, rows: int = 32) -> list[Tensor]:
    draw = torch.Generator(device=DEVICE).manual_seed(0)
    return [torch.randn(rows, 256, WIDTH, device=DEVICE, generator=draw) for _ in range(count)]


def cuda_graphs_keep_gradients(folder: Path) -> list[Row]:
    """Four micro-batches through CUDA graphs against eager ones: weights after four updates.

    Once as the user's own mode, and once as a plan that is switched on after the first update and off after the third.
    """
    file = write_switches(folder, Plan(), [Switch(1, Plan(compile="regional", cuda_graphs=True)), Switch(3, Plan())])
    ways: dict[str, dict[str, Any]] = {
        "eager": {},
        "the user's own": {"compile": "on", "compile_mode": "reduce-overhead", "compile_scope": "whole"},
        "from a plan": {"compile": "auto", "plan": file},
    }
    found: dict[str, Tensor] = {}
    rows = []
    for name, options in ways.items():
        torch._dynamo.reset()
        loop = Loop(**options)
        held = loop.session(folder, size=4)
        for x in batches(16):
            loop.micro_batch(held, x, 1)
        found[name] = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
        ran = ", then ".join(switch.plan.name for switch in held.planner.switches) or name
        held.end()
        if name != "eager":
            off = float((found[name] - found["eager"]).norm() / found["eager"].norm())
            rows.append((f"CUDA graphs ({ran}), 4 micro-batches: weights off eager", f"{off:.1e}", "<= 1e-4"))
    return rows


def scaler_skips(folder: Path) -> Row:
    """An inf in a batch: the update is skipped, weights stay, the scale is halved, the next update is made."""
    loop = Loop("fp16")
    held = loop.session(folder)
    x = batches(1)[0]
    loop.micro_batch(held, x, 1)
    before = [p.detach().clone() for p in loop.model.parameters()]
    skipped = loop.micro_batch(held, torch.full_like(x, float("inf")), 1)
    kept = all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), before, strict=True))
    scale = loop.scaler.get_scale() if loop.scaler is not None else 0.0
    after = loop.micro_batch(held, x, 1)
    held.end()
    words = f"skipped {not skipped.stepped}, weights kept {kept}, scale {scale:.0f}, then stepped {after.stepped}"
    return "fp16 with an inf in a batch", words, "skipped, kept, 512, stepped"


def memory(folder: Path) -> list[Row]:
    """Peaks of eager steps and of CUDA graphs."""
    rows, eager = [], 0.0
    for name, options in (
        ("eager", {}),
        ("compiled", {"compile": "on"}),
        ("CUDA graphs", {"compile": "on", "compile_mode": "reduce-overhead", "compile_scope": "whole"}),
    ):
        torch.cuda.empty_cache()
        loop = Loop("bf16", **options)
        held = loop.session(folder)
        for x in batches(12):
            loop.micro_batch(held, x, 1)
        held.end(folder / name)
        facts = json.loads((folder / name / "accel_report.json").read_text())["memory"]
        first, steady = facts["first_step_peak_gib"], facts["steady_peak_gib"]
        eager = eager or steady
        rows.append(
            (f"memory, {name}", f"first {first:.2f}, steady {steady:.2f} GiB", f"{steady / eager:.2f} of eager")
        )
        torch._dynamo.reset()
    return rows


def step_seconds() -> float:
    """Of an eager update."""
    loop, data = Loop("host"), batches(1)[0]
    loop.x, began = data, 0.0
    for index in range(60):
        if index == 10:
            finish()
            began = time.perf_counter()
        loop.loss().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    finish()
    return (time.perf_counter() - began) / 50


def finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def plan(folder: Path, seconds_wanted: float = 80.0) -> list[Row]:
    """A run of about so long with everything left open, twice: the second starts with what the first learnt."""
    rows, eager = [], 0.0
    updates = int(seconds_wanted / step_seconds())
    for name in ("host", "first", "again"):
        torch._dynamo.reset()
        options = {} if name == "host" else {"plan": "auto", "compile": "auto"}
        loop = Loop("host" if name == "host" else "auto", **options)
        held, data = loop.session(folder), batches(4)
        finish()
        began = time.perf_counter()
        for update in range(updates):
            loop.micro_batch(held, data[update % 4], updates - update)
        finish()
        seconds = time.perf_counter() - began
        held.end()
        learnt, steps = held.planner.beside.learnt, f"{seconds:.1f} s"
        if name == "host":
            eager = seconds
            rows.append((f"{updates} updates, plug eager, fp32", steps, ""))
            continue
        at = [switch.update for switch in held.planner.switches]
        rows.append((f"{updates} updates, {name}: {held.planner.plan.name}", f"{steps}, {seconds / eager:.2f}", "< 1"))
        rows.append((f"  switched at {at}", f"cold {learnt.cold_seconds:.1f} s, warm {learnt.warm_seconds:.1f} s", ""))
        rows.append(("  compile", learnt.reason, ""))
        timings = held.planner.timings
        if timings:
            figures = [f"{t.plan.name} {t.middle * 1e3:.2f} (spread {t.spread * 1e3:.2f})" for t in timings]
            rows.append(("  candidates, ms a step", "; ".join(figures), ""))
            tried = any(t.plan.cuda_graphs for t in timings)
            rows.append(("  CUDA graphs", "a candidate" if tried else "no candidate", "a candidate"))
    return rows


def attempt(check: Callable[[Path], Any], folder: Path) -> list[Row]:
    """A check's rows; one that fails is a row as well."""
    try:
        found = check(folder)
    except Exception as error:
        return [(check.__name__.replace("_", " "), f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", "")]
    return found if isinstance(found, list) else [found]


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; nothing to check")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "measured", "wanted", title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for check in (scaler_skips, cuda_graphs_keep_gradients, memory, plan):
            for row in attempt(check, folder):
                table.add_row(*row)
                print(" | ".join(row), flush=True)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
