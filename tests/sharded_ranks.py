"""What two ranks of a loop run with a model on which `fully_shard` was called, see `tests/processes.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from plugins.errors import AccelError
from plugins.loop import Accelerated
from tests.loops import data

PARTS = [[4, 2, 3, 1], [5, 2, 1, 6]]  # micro-batches of each rank, two an update
OPTIONS = {"accumulate": 2, "clip_norm": 0.05, "ema": 0.5, "memory_format": "host"}


def net() -> nn.Module:
    """Odd sizes: the ranks' shards differ."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 7), nn.BatchNorm1d(7).eval(), *blocks, nn.Linear(7, 3))


def sharded() -> nn.Module:
    return whole_sharded(net())


def whole_sharded(model: nn.Module) -> nn.Module:
    """Each block a unit, and what is left."""
    for block in model:
        if isinstance(block, nn.Sequential):
            fully_shard(block)
    fully_shard(model)
    return model


def parts(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*(t.split(PARTS[rank]) for t in data(sum(PARTS[rank]), seed=rank)), strict=True))


def run_of(model: nn.Module, **options) -> Accelerated:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Accelerated(model, optimizer, say=lambda line: None, batchnorm="freeze", **{**OPTIONS, **options})


def step(accel: Accelerated, batch, bad: bool = False) -> object:
    x, y = batch
    with accel.forward(x, y) as (x, y):
        loss = F.cross_entropy(accel.model(x), y) * (float("nan") if bad else 1.0)
    return accel.backward(loss, weight=len(x))


def epoch(accel: Accelerated, rank: int, validate: bool = True) -> list[float]:
    norms = []
    for batch in parts(rank):
        outcome = step(accel, batch)
        if outcome is not None:
            norms.append(outcome.norm)
            if validate:  # leaves the root's parameters whole, with the averaged weights
                with accel.validation() as model:
                    model(batch[0])
    return norms


def train(rank: int, folder: str) -> None:
    """Two epochs; the same with a stop in the middle of a window; a NaN on one rank; a batch without targets."""
    accel = run_of(sharded())
    norms = epoch(accel, rank) + epoch(accel, rank)
    with torch.no_grad():
        accel.model(parts(rank)[0][0])
    assert accel.session.beside_model() == []  # also while the root's parameters are gathered
    found = {"norms": norms, "average": accel.weights(), "report": accel.session.report.data()}
    path = accel.save(Path(folder) / "whole.pt", epoch=2)

    again = run_of(sharded())
    for batch in parts(rank)[:3]:
        step(again, batch)
    torch.manual_seed(rank)
    again.save(Path(folder) / "middle.pt", at=3)
    drawn = torch.rand(1)
    resumed = run_of(sharded())
    found["extra"] = resumed.resume(Path(folder) / "middle.pt")
    found["drawn"] = bool(torch.equal(torch.rand(1), drawn))
    step(resumed, parts(rank)[3])
    epoch(resumed, rank)
    resumed.save(Path(folder) / "resumed.pt", epoch=2)

    before, updates = accel.weights(), accel.average.updates
    x, y = data(4)
    step(accel, (x, y))
    found["skipped"] = step(accel, (x, y), bad=rank == 1).stepped
    found["kept"] = all(torch.equal(value, before[name]) for name, value in accel.weights().items())
    found["average_kept"] = accel.average.updates == updates

    few = x[: 4 * (1 - rank)], y[: 4 * (1 - rank)]  # rank 1 has no target
    with accel.forward(*few) as (a, b):
        loss = F.cross_entropy(accel.model(a), b, reduction="sum") / max(len(a), 1)
    accel.backward(loss, weight=len(a))
    found["empty"] = step(accel, (x, y)).norm
    try:
        run_of(whole_sharded(nn.Sequential(nn.Conv2d(3, 4, 3))), memory_format="channels_last")
    except AccelError as error:
        found["layout"] = str(error)
    compiled = run_of(sharded(), compile="on", compile_backend="aot_eager")
    epoch(compiled, rank)
    found["compiled"] = epoch(compiled, rank)
    compiled.end()
    found["compile"] = compiled.session.report.data()["compile"]
    torch.save(found, Path(folder) / f"{rank}.pt")
    accel.end()
    assert path.is_file()
    assert dist.get_world_size() == 2
