"""What the ranks of the loop's tests run, see `tests/processes.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from plugins.errors import AccelError
from tests.loops import accelerated, data, net
from tests.processes import leave

PARTS = [[4, 2, 3, 1, 4], [5, 2], []]  # micro-batches of each rank: windows of 2 + 2 + 1, of 2, and none


def parts(rank):
    return list(zip(*(t.split(PARTS[rank]) for t in data(sum(PARTS[rank]), seed=rank)), strict=True))


def head(seed):
    torch.manual_seed(seed)
    return nn.Parameter(torch.randn(3))


def train(rank, folder):
    """Unequal counts of batches: two epochs, one of each form of loop; then a rank that leaves without a word."""
    model, own = net(seed=rank), head(rank)
    optimizer = torch.optim.SGD([*model.parameters(), own], lr=0.1, momentum=0.9)
    accel = accelerated(model, optimizer, accumulate=2, clip_norm=0.5, ema=0.5)

    def loss_of(batch):
        return F.cross_entropy(model(batch[0]) * own, batch[1])

    for x, y in parts(rank):
        with accel.forward(x, y) as batch:
            loss = loss_of(batch)
        accel.backward(loss, weight=len(x))
    accel.flush()
    for batch in accel.batches(parts(rank)):
        accel.training_step(loss_of, batch)
    found = {"model": model.state_dict(), "own": own.detach(), "updates": accel.updates, "average": accel.weights()}
    told = ""
    for x, y in parts(0) if rank == 0 else []:
        with accel.forward(x, y) as batch:
            loss = loss_of(batch)
        try:
            accel.backward(loss, weight=len(x))
        except AccelError as error:
            told = str(error)
            break
    torch.save({**found, "told": told}, Path(folder) / f"{rank}.pt")
    accel.end()
    leave()
