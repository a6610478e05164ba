"""Two reports with made-up figures, of which docs/report.md shows the page and the comparison.

python -m tests.core.telemetry.sample FOLDER    writes them as FOLDER/plain and FOLDER/tuned
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from plugins.core.telemetry.report import Report
from plugins.core.telemetry.series import Series

EPOCHS, UPDATES = 60, 2400


def sample(tuned: bool) -> tuple[Report, Series]:
    """A detector that overfits from its fortieth epoch on, as the host runs it or with a plan."""
    draw = random.Random(0)
    made = Report("ultralytics", {"compile": "auto" if tuned else "off", "precision": "auto" if tuned else "fp32"})
    made.device, made.model, made.parameters = "an accelerator", "DetectionModel", 3_011_238
    made.versions = {"torch": "2.9.0", "ultralytics": "8.4.0"}
    window = made.window
    window.updates, window.accumulate, window.micro_batch, window.effective_batch = UPDATES, 4, 16, 64
    window.micro_batches = 4 * UPDATES
    made.batchnorm.layers = 57
    made.memory.kind, made.memory.limit_gib = "cuda", 24.0
    made.memory.first_step_peak_gib, made.memory.steady_peak_gib = (9.4, 8.1) if tuned else (14.2, 14.0)
    made.speed.step_seconds_median, made.speed.samples_per_second = (0.245, 261.2) if tuned else (0.49, 130.6)
    made.speed.loader_wait_fraction = 0.26 if tuned else 0.04
    if tuned:
        made.speed.plan = "bf16 + channels_last + regional compile"
        made.speed.reason = "bf16 + channels_last: 0.0816 s a step against 0.124 s"
        made.speed.candidates = [
            {"plan": plan, "step_seconds_median": seconds, "spread_seconds": spread, "loss": 2.51}
            for plan, seconds, spread in (
                ("host", 0.124, 0.004), ("bf16 + channels_last", 0.0816, 0.002), ("channels_last", 0.118, 0.003),
                ("bf16 + channels_last", 0.081, 0.002), ("bf16 + channels_last + regional compile", 0.0612, 0.001),
            )
        ]  # fmt: skip
        made.compile.decision, made.compile.reason = "regional", "0.0612 s a step, eager 0.081 s"
        made.compile.graphs = 6
    epochs = range(1, EPOCHS + 1)
    made.losses.unit = "epoch"
    made.losses.train = [(e, 4.2 * math.exp(-e / 12) + 0.55 - 0.004 * e + draw.gauss(0, 0.02)) for e in epochs]
    made.losses.valid = [
        (e, 4.4 * math.exp(-e / 10) + 0.95 + 0.00025 * max(0, e - 22) ** 2 + draw.gauss(0, 0.03)) for e in epochs
    ]
    series = Series()
    for update in range(UPDATES):
        series.seconds.append(30.0 if not update else 0.25 + 0.02 * draw.random() + 0.2 * (update < 200))
        series.waits.append(0.08 * draw.random())
        series.norms.append(8 * math.exp(-update / 500) + draw.random())
        series.memory.append(7 + 0.001 * (update % 700))
    series.compiled_at, series.switched_at = ([0, 201], [60, 205]) if tuned else ([], [])
    return made, series


def write(folder: Path) -> tuple[Path, Path]:
    """The folders of the plain run and of the tuned one."""
    for name in ("plain", "tuned"):
        report, series = sample(name == "tuned")
        report.write(folder / name, series)
    return folder / "plain", folder / "tuned"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
