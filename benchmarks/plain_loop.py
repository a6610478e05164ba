"""A plain loop on any device, closed by a session of the core: what examples/gpu_check.py measures."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import Blocks
from plugins import AccelConfig
from plugins.bench import Gated
from plugins.core.session import RunSpec, Session


@dataclass(frozen=True)
class Sizes:
    """Of the model's input [rows, length, width], of the timed updates, and of the run that chooses its plan."""

    rows: int = 32
    length: int = 256
    width: int = 128
    updates: int = 40
    seconds: float = 80.0
    compiles: bool = True


SMALL = Sizes(rows=2, length=8, width=16, updates=4, seconds=0.5, compiles=False)


class Loop:
    """A plain loop: one micro-batch after the other, with a session that closes windows of `size`."""

    host_precision = "fp32"

    def __init__(self, device: torch.device, sizes: Sizes, precision: str = "fp32", **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.rows = device, sizes.rows
        self.model = Blocks(lambda: Gated(sizes.width)).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        scales = precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0) if scales else None
        self.precision, self.options = precision, options
        self.x = torch.empty(0)

    def loss(self) -> Tensor:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        inside = torch.autocast(self.device.type, kinds[self.precision]) if self.precision in kinds else nullcontext()
        with inside:
            value: Tensor = self.model(self.x).float().square().mean()
            return value

    def apply(self, precision: str, memory_format: str) -> None:
        self.precision = precision if precision != "host" else self.precision

    def bare(self) -> Any:
        return nullcontext()

    def session(self, folder: Path, size: int = 1) -> Session:
        options = {"plan": "off", "compile": "off", "cache_dir": folder / "cache", **self.options}
        config = AccelConfig(precision=self.precision, **options)
        spec = RunSpec(
            config,
            "check",
            self.model,
            self.optimizer,
            self.device,
            micro_batch=self.rows,
            size=size,
            scaler=self.scaler,
            say=lambda text: None,
        )
        return Session(spec)

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
