"""What this project promises, measured on one device in a few minutes; prints one table.

    python examples/gpu_check.py                          # CUDA; without it says so, and ends well
    python examples/gpu_check.py --device cpu --small     # the same code where no GPU is, in seconds
    python examples/gpu_check.py --device mirror --small  # tests/mirror.py: a second device without hardware

Rows: seconds and peak memory of each plan, beside what is usually claimed of it; whether accumulation through CUDA
graphs keeps gradients; a skipped step under the gradient scaler; a resume; what plan a run chooses by itself. What a
device cannot do is a row `not here: reason`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.plain_loop import SMALL, Loop, Sizes  # noqa: E402
from plugins.core.autotune.plan_file import Switch, write_switches  # noqa: E402
from plugins.core.compile.toolchain import missing_compiler  # noqa: E402
from plugins.core.plan import Plan  # noqa: E402
from plugins.core.step import precision  # noqa: E402
from plugins.core.system import devices  # noqa: E402
from plugins.loop import Accelerated  # noqa: E402

Row = tuple[str, str, str]  # what, measured, wanted or usually claimed
COMPILED = {"compile": "on", "compile_scope": "regional"}
GRAPHS = {"compile": "on", "compile_mode": "reduce-overhead", "compile_scope": "whole"}
PLANS: dict[str, tuple[str, dict[str, Any], str]] = {  # precision, options, what is usually claimed
    "eager, fp32": ("fp32", {}, ""),
    "eager, fp16": ("fp16", {}, ""),
    "eager, bf16": ("bf16", {}, ""),
    "compiled blocks, bf16": ("bf16", COMPILED, "15 to 30 % faster"),
    "compiled whole, bf16": ("bf16", {"compile": "on", "compile_scope": "whole"}, "15 to 30 % faster"),
    "CUDA graphs, bf16": ("bf16", GRAPHS, "5 to 10 % more memory"),
}


class NotHere(Exception):
    """What this device cannot do, and why, in a few words."""


class Check:
    """The checks of one device, each a function of a folder that gives rows."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes

    def batches(self, count: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        shape = self.sizes.rows, self.sizes.length, self.sizes.width
        return [torch.randn(shape, generator=draw).to(self.device) for _ in range(count)]

    def needs(self, precision_name: str, options: dict[str, Any]) -> None:
        """Raises NotHere where the device has not what these settings need."""
        try:
            precision.resolve(precision_name, self.device)
        except precision.Unsupported as error:
            raise NotHere(str(error).partition(";")[0]) from None
        if options.get("compile_mode") == "reduce-overhead" and not devices.has_cuda_graphs(self.device):
            raise NotHere(f"{self.device.type} has no CUDA graphs")
        if options.get("compile", "off") != "off":
            if why := missing_compiler(self.device, "inductor"):
                raise NotHere(why)
            if not self.sizes.compiles:
                raise NotHere("--small compiles nothing")

    # -- rows ---------------------------------------------------------------------------------------------------

    def plans(self, folder: Path) -> list[Row]:
        """Seconds and peak memory of an update under each plan; the ratios are to eager in the same precision."""
        rows: list[Row] = []
        eager: dict[str, tuple[float, float]] = {}
        for name, (kind, options, claim) in PLANS.items():
            try:
                self.needs(kind, options)
            except NotHere as reason:
                rows.append((name, f"not here: {reason}", claim))
                continue
            seconds, gib = self.timed(kind, options, folder / name)
            base = eager.setdefault(kind, (seconds, gib))
            figures = f"{seconds * 1e3:.2f} ms an update, peak {gib:.2f} GiB"
            if options:
                more = f", {gib / base[1] - 1:+.0%} memory" if base[1] else ""
                figures += f": {base[0] / seconds - 1:+.0%} speed{more}"
            rows.append((name, figures, claim and f"usual claim: {claim}"))
        return rows

    def timed(self, kind: str, options: dict[str, Any], folder: Path) -> tuple[float, float]:
        """Seconds of an update and the steady peak in GiB, after a quarter of the updates to warm up."""
        torch._dynamo.reset()
        devices.empty_cache(self.device)
        loop, updates = Loop(self.device, self.sizes, kind, **options), self.sizes.updates
        held, data = loop.session(folder), self.batches(4)
        began = time.perf_counter()
        for update in range(-(updates // 4), updates):
            if update == 0:
                devices.synchronize(self.device)
                began = time.perf_counter()
            loop.micro_batch(held, data[update % 4], 1)
        devices.synchronize(self.device)
        seconds = (time.perf_counter() - began) / updates
        held.end(folder)
        facts = json.loads((folder / "accel_report.json").read_text())["memory"]
        return seconds, float(facts["steady_peak_gib"] or 0.0)

    def cuda_graphs_keep_gradients(self, folder: Path) -> list[Row]:
        """Four micro-batches through CUDA graphs against eager ones: weights after four updates.

        Once as the user's own mode, and once as a plan that is switched on after the first update and off after the
        third. Gradients are allocated before capture and kept.
        """
        self.needs("host", GRAPHS)
        file = write_switches(
            folder, Plan(), [Switch(1, Plan(compile="regional", cuda_graphs=True)), Switch(3, Plan())]
        )
        ways: dict[str, dict[str, Any]] = {
            "eager": {},
            "the user's own": GRAPHS,
            "from a plan": {"compile": "auto", "plan": file},
        }
        found: dict[str, Tensor] = {}
        rows = []
        for name, options in ways.items():
            torch._dynamo.reset()
            loop = Loop(self.device, self.sizes, "host", **options)  # as the plan's file says
            held = loop.session(folder, size=4)
            for x in self.batches(16):
                loop.micro_batch(held, x, 1)
            found[name] = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
            ran = ", then ".join(switch.plan.name for switch in held.tuner.switches) or name
            held.end()
            if name != "eager":
                off = float((found[name] - found["eager"]).norm() / found["eager"].norm())
                rows.append((f"CUDA graphs ({ran}), 4 micro-batches: weights off eager", f"{off:.1e}", "<= 1e-4"))
        return rows

    def fp16_skips(self, folder: Path) -> list[Row]:
        """An inf in a batch: the update is skipped, weights stay, the scale is halved, the next update is made."""
        self.needs("fp16", {})
        loop = Loop(self.device, self.sizes, "fp16")
        held = loop.session(folder)
        x = self.batches(1)[0]
        loop.micro_batch(held, x, 1)
        before = [p.detach().clone() for p in loop.model.parameters()]
        skipped = loop.micro_batch(held, torch.full_like(x, float("inf")), 1)
        kept = all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), before, strict=True))
        scale = loop.scaler.get_scale() if loop.scaler is not None else 0.0
        after = loop.micro_batch(held, x, 1)
        held.end()
        words = f"skipped {not skipped.stepped}, weights kept {kept}, scale {scale:.0f}, then stepped {after.stepped}"
        return [("fp16 with an inf in a batch", words, "skipped True, kept True, 512, stepped True")]

    def resume(self, folder: Path) -> list[Row]:
        """Six micro-batches in windows of two, straight and with a save inside the second window."""
        data = self.batches(6)

        def accelerated() -> Accelerated:
            loop = Loop(self.device, self.sizes)
            adam = torch.optim.AdamW(loop.model.parameters())
            options: dict[str, Any] = {"plan": "off", "compile": "off", "cache_dir": folder / "cache"}
            return Accelerated(loop.model, adam, accumulate=2, ema=0.9, say=lambda text: None, **options)

        def feed(accel: Accelerated, part: Sequence[Tensor]) -> Accelerated:
            for x in part:
                with accel.forward(x) as images:
                    loss = accel.model(images).float().square().mean()
                accel.backward(loss, weight=len(x))
            return accel

        straight = feed(accelerated(), data).weights()
        feed(accelerated(), data[:3]).save(folder / "half.pt")
        rest = accelerated()
        rest.resume(folder / "half.pt")
        ended = feed(rest, data[3:]).weights()
        off = max(float((ended[n] - straight[n]).abs().max()) for n in straight)
        return [("resume inside a window: averaged weights off the straight run", f"{off:.1e}", "0.0e+00")]

    def chosen_plan(self, folder: Path) -> list[Row]:
        """A run of so long with everything left open, twice: the second starts with what the first learnt."""
        rows, eager = [], 0.0
        step, _ = self.timed("fp32", {}, folder / "step")
        updates = max(int(self.sizes.seconds / step), 10)
        wanted = {"plan": "auto", "compile": "auto" if self.sizes.compiles else "off"}
        for name in ("host", "first", "again"):
            torch._dynamo.reset()
            loop = Loop(
                self.device, self.sizes, "host" if name == "host" else "auto", **({} if name == "host" else wanted)
            )
            held, data = loop.session(folder), self.batches(4)
            devices.synchronize(self.device)
            began = time.perf_counter()
            for update in range(updates):
                loop.micro_batch(held, data[update % 4], updates - update)
            devices.synchronize(self.device)
            seconds = time.perf_counter() - began
            held.end()
            steps = f"{seconds:.1f} s"
            if name == "host":
                eager = seconds
                rows.append((f"{updates} updates, plug eager, fp32", steps, ""))
                continue
            findings, timings = held.tuner.background.findings, held.tuner.timings
            at = [switch.update for switch in held.tuner.switches]
            ratio = f"{steps}, {seconds / eager:.2f}"
            rows.append((f"{updates} updates, {name}: {held.tuner.plan.name}", ratio, "< 1"))
            rows.append(
                (f"  switched at {at}", f"cold {findings.cold_seconds:.1f} s, warm {findings.warm_seconds:.1f} s", "")
            )
            rows.append(("  compile", findings.reason or wanted["compile"], ""))
            if timings:
                figures = [f"{t.plan.name} {t.middle * 1e3:.2f} (spread {t.spread * 1e3:.2f})" for t in timings]
                rows.append(("  candidates, ms a step", "; ".join(figures), ""))
                tried = any(t.plan.cuda_graphs for t in timings)
                rows.append(("  CUDA graphs", "a candidate" if tried else "no candidate", "a candidate"))
        return rows


def attempt(check: Callable[[Path], list[Row]], folder: Path) -> list[Row]:
    """A check's rows; one that fails is a row as well, and so is one that this device cannot run."""
    name = check.__name__.replace("_", " ")
    try:
        return check(folder)
    except NotHere as reason:
        return [(name, f"not here: {reason}", "")]
    except Exception as error:
        return [(name, f"failed: {type(error).__name__}: {[*str(error).splitlines(), ''][0][:100]}", "")]


def run(device: torch.device, sizes: Sizes) -> list[Row]:
    """All rows, each printed as it is found."""
    made, rows = Check(device, sizes), []
    with tempfile.TemporaryDirectory() as name:
        checks = (made.fp16_skips, made.resume, made.cuda_graphs_keep_gradients, made.plans, made.chosen_plan)
        for check in checks:
            folder = Path(name) / check.__name__
            folder.mkdir()
            for row in attempt(check, folder):
                rows.append(row)
                print(" | ".join(row), flush=True)
    return rows


def main(arguments: Sequence[str] = ()) -> int:
    """Prints the table; 1 where a check failed."""
    parser = argparse.ArgumentParser(description="What this project promises, measured on one device.")
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too), xpu, mps, cpu, or mirror")
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes, and nothing compiled")
    chosen = parser.parse_args(arguments)
    inside: Any = nullcontext()
    if chosen.device == "mirror":
        from tests import mirror

        inside = mirror.Mode()
    if chosen.device not in ("cpu", devices.accelerator()):
        print(f"gpu_check: no {chosen.device.upper()} device here; nothing to check")
        return 0
    from rich.console import Console
    from rich.table import Table

    with inside:
        device = devices.CPU if chosen.device == "cpu" else devices.own()
        rows = run(device, SMALL if chosen.small else Sizes())
        table = Table("what", "measured", "wanted", title=f"{devices.name(device)}, torch {torch.__version__}")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return int(any(measured.startswith("failed: ") for _, measured, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
