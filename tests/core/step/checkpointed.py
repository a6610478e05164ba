"""A network whose blocks move buffers, attributes and generators, and a run of it with checkpointing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core.session import RunSpec, Session
from plugins.core.step.checkpointed_module import CheckpointedModule

RAN: list[str] = []  # forwards of blocks, second runs included


class Block(nn.Module):
    """Moves buffers and attributes, and draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(4, 1, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count, self.seen = 0, []  # type: int, list[int]

    def forward(self, x: Tensor) -> Tensor:
        RAN.append("block")
        self.count += 1
        self.calls = self.calls + 1
        self.seen.append(len(x))
        self.scale.mul_(1.01)
        drawn = random.random() + float(np.random.rand())
        return x + torch.relu(self.drop(self.norm(self.conv(x)))) * self.scale * (drawn + self.count)


class Net(nn.Module):
    """A stem, three blocks and a Sequential of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).mean((2, 3))
        return out


class Run:
    """A session on a small network; `step` is a micro-batch."""

    def __init__(self, model: nn.Module | None = None, size: int = 1, **options: Any) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        RAN.clear()
        self.model = (model if model is not None else Net()).train()
        self.said: list[str] = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        config = AccelConfig(**{"plan": "off", "compile": "off", "checkpointing": "on", **options})
        self.session = Session(
            RunSpec(
                config, "test", self.model, optimizer, torch.device("cpu"), micro_batch=8, size=size,
                say=self.said.append,
            )
        )  # fmt: skip
        self.draw = torch.Generator().manual_seed(1)

    def step(self, precision: torch.dtype | None = None, **arguments: Any) -> None:
        x = torch.randn(8, 2, 10, 10, generator=self.draw)
        self.session.micro_batch(len(x))
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = self.model(x, **arguments).float().square().mean()
        (loss * self.session.mean(len(x))).backward()
        self.session.backward_done()

    def trace(self) -> dict[str, Any]:
        """All that a step may change."""
        blocks = [m for m in self.model.modules() if isinstance(m, Block)]
        return {
            **self.model.state_dict(),
            "counts": torch.tensor([b.count for b in blocks]),
            "seen": torch.tensor([len(b.seen) for b in blocks]),
            "drawn": torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()])]),
        }


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def standing(model: nn.Module) -> list[CheckpointedModule]:
    return [m._compiled_call_impl for m in model.modules() if isinstance(m._compiled_call_impl, CheckpointedModule)]
