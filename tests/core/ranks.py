"""What the two ranks of the core's tests run, see `tests/processes.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.core.tiny import FORMS, batches, mlp, session_of

SIZES = [[1, 4, 2, 3, 2], [5, 2, 1, 1, 3]]  # micro-batches of each rank: unequal, windows of 2 + 2 + 1
EMPTY = [[1], [0, 4]]
REACHES_EXTRA = "mean"  # the run in which one rank alone reaches the parameter `extra`


def train(rank: int, folder: str) -> None:
    """Two and a half windows on one rank with each form of loss; saves weights and sizes of all-reduces."""
    calls: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    found = {}
    for form in FORMS:
        calls.clear()
        model = run(rank, form)
        found[form] = {
            "model": model.state_dict(),
            "large": [n for n in calls if n > 2],
            "small": [n for n in calls if n <= 2],
        }
    dist.all_reduce = reduce
    torch.save(found, Path(folder) / f"{rank}.pt")


def run(rank: int, form: str) -> torch.nn.Module:
    """Gradients are averaged over ranks, so the loss is multiplied by their number, as the hosts do."""
    model = mlp(3, torch.float64)
    model.register_parameter("extra", torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    session = session_of(model, optimizer, 2, sync=True)
    loss, weight = FORMS[form]
    for index, batch in enumerate(batches(rank, SIZES[rank], torch.float64, EMPTY[rank])):
        session.micro_batch(len(batch.x))
        value = loss(model, batch) * weight(session, batch) * dist.get_world_size()
        if form == REACHES_EXTRA and rank == 1 and index == 0:
            value = value + model.extra.sum() * 0.0
        value.backward()
        session.backward_done()
    session.close()
    return model
