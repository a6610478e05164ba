"""What happened in a run, as data (schema 1). Its page is drawn in `html.py`."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from plugins.core.checkpoint.atomic_file import write_atomically
from plugins.core.telemetry.html import render
from plugins.core.telemetry.losses import LossFacts
from plugins.core.telemetry.series import Series

SCHEMA = 1
LARGEST = 2**63 - 1
JSON_NAME, HTML_NAME = "accel_report.json", "accel_report.html"


@dataclass
class WindowFacts:
    """Accumulation: sizes in micro-batches and samples, counts of updates, and what is not exact."""

    accumulate: int = 1
    micro_batch: int = 0
    effective_batch: int = 0
    micro_batches: int = 0
    updates: int = 0
    partial_windows: int = 0
    skipped_updates: int = 0
    dropped_micro_batches: int = 0
    exact: bool = True
    approximate_terms: list[str] = field(default_factory=list)


@dataclass
class CompileFacts:
    """The compile decision, and what was compiled. `seconds` are those of compiling in this process."""

    decision: str = "eager"
    reason: str = ""
    mode: str = "default"
    graphs: int = 0
    recompiles: int = 0
    recompile_reasons: list[str] = field(default_factory=list)
    graph_breaks: int = 0
    graph_break_reasons: list[str] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)
    marking: str = ""
    budget: int = 0
    seconds: float = 0.0
    cache: str = ""
    break_even_update: int | None = None


@dataclass
class SpeedFacts:
    """The plan in force and how it was chosen; times in seconds."""

    plan: str = "host"
    reason: str = ""
    candidates: list[dict[str, Any]] = field(default_factory=list)
    switches: list[dict[str, Any]] = field(default_factory=list)
    precision: str = "host"
    memory_format: str = "host"
    first_step_seconds: float | None = None
    step_seconds_median: float | None = None
    samples_per_second: float | None = None
    loader_wait_fraction: float | None = None


@dataclass
class MemoryFacts:
    """Peaks in GiB, and the most there is; `kind` says of what: the device's allocator, or rss, the resident memory.

    `out_of_memory`, where memory ran out: `count` of times, `update` of the latest, `micro_batch` since.
    """

    kind: str = ""
    allocator: str = "host"
    checkpointing: str = "off"
    first_step_peak_gib: float | None = None
    steady_peak_gib: float | None = None
    limit_gib: float | None = None
    out_of_memory: dict[str, int] = field(default_factory=dict)


@dataclass
class ShapeFacts:
    """Shapes of inputs, bucket edges (px or tokens), and the share of padding."""

    seen: list[list[int]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    padding_fraction: float | None = None


@dataclass
class GradientFacts:
    """L2 norms before clipping, and parameters that got no gradient."""

    norm_median: float | None = None
    clip_norm: float | None = None
    clipped_fraction: float | None = None
    without_gradient: list[str] = field(default_factory=list)


@dataclass
class BatchNormFacts:
    """Layers with running statistics, and the rule that they follow."""

    layers: int = 0
    rule: str = "host"
    micro_batch_too_small: bool = False


@dataclass
class EmaFacts:
    """The moving average of the weights."""

    decay: float | str | None = None
    updates: int = 0


@dataclass
class Report:
    """`host` is the plug's name; `config` the settings in force; `model` a class and `parameters` its count of numbers.

    Fill the parts, then `write` into the run's folder.
    """

    host: str
    config: dict[str, Any]
    schema: int = SCHEMA
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    warnings: list[str] = field(default_factory=list)
    model: str = ""
    parameters: int = 0
    window: WindowFacts = field(default_factory=WindowFacts)
    compile: CompileFacts = field(default_factory=CompileFacts)
    speed: SpeedFacts = field(default_factory=SpeedFacts)
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    shapes: ShapeFacts = field(default_factory=ShapeFacts)
    gradients: GradientFacts = field(default_factory=GradientFacts)
    batchnorm: BatchNormFacts = field(default_factory=BatchNormFacts)
    ema: EmaFacts = field(default_factory=EmaFacts)
    losses: LossFacts = field(default_factory=LossFacts)
    checkpoints: list[str] = field(default_factory=list)

    def write(self, folder: Path, series: Series | None = None) -> Path:
        """Write `accel_report.json` and `accel_report.html`; returns the JSON's path."""
        folder.mkdir(parents=True, exist_ok=True)
        data = self.data()
        text = json.dumps(data, indent=2, allow_nan=False)
        write_atomically(folder / JSON_NAME, lambda file: file.write(text.encode()))
        page = render(data, series)
        write_atomically(folder / HTML_NAME, lambda file: file.write(page.encode()))
        return folder / JSON_NAME

    def data(self) -> dict[str, Any]:
        """As JSON values; what is not finite is None, and curves of losses are thinned."""
        found = _plain(asdict(replace(self, losses=self.losses.thinned())))
        order = ["schema", "host", "versions", "device", "config", "warnings"]
        return {**{k: found[k] for k in order}, **found}


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of Python, torch and the named distributions."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("accel-plugins", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """What every reader of JSON takes.

    A number that is not finite becomes null, an integer that no run counts up to `LARGEST`, and what is no Unicode in
    a text (a file's name) its code.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, int) and abs(value) > LARGEST:
        return LARGEST if value > 0 else -LARGEST
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
