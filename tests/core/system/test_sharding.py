"""Shards of one process: what is not sharded stays as it is. On two ranks: `tests/loop/test_sharded.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from plugins.core.system import sharding
from tests import processes


def test_plain_tensors_stay_the_objects_that_they_are() -> None:
    tensor, state = torch.ones(3), {"a": [torch.zeros(2), 1], "b": "text"}
    assert not sharding.is_sharded(tensor)
    assert sharding.shard(tensor) is tensor
    assert sharding.placed_as(tensor, torch.zeros(3)) is tensor
    assert sharding.whole(state)["a"][0] is state["a"][0]
    model = nn.Linear(2, 2)
    assert not sharding.holds_shards(model)
    sharding.reshard(model)


def test_the_norm_of_plain_tensors_is_torchs_own_to_the_last_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=draw) for size in (3, 1, 70, 513)]
    assert torch.equal(sharding.total_norm(tensors), torch.nn.utils.get_total_norm(tensors))
    assert float(sharding.total_norm([])) == 0.0


def test_the_state_of_an_optimizer_without_shards_stays_as_it_is() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    state = optimizer.state_dict()
    assert sharding.placed_for(optimizer, state) == state


def on_ranks(rank: int, folder: str) -> None:
    """Uneven shards, and plain tensors beside them."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    right = [p.detach().clone() for p in plain.parameters()]
    fully_shard(plain[1])
    fully_shard(plain)
    assert sharding.holds_shards(plain)
    held = [p.detach() for p in plain.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(sharding.whole(held), right, strict=True))
    for live, value in zip(held, right, strict=True):
        assert torch.equal(sharding.placed_as(value, live).to_local(), live.to_local())  # type: ignore[attr-defined]
    beside = torch.full((2,), 3.0)
    torch.testing.assert_close(
        sharding.total_norm([*held, beside]), torch.nn.utils.get_total_norm([*right, beside]), rtol=1e-6, atol=0.0
    )
    with torch.no_grad():
        plain(torch.ones(2, 4))
    assert not all(sharding.is_sharded(p) for p in plain.parameters())  # the root's stay gathered
    sharding.reshard(plain)
    assert all(sharding.is_sharded(p) for p in plain.parameters())
    shards = sharding.shard(held[0])
    shards.mul_(2.0)
    assert torch.equal(sharding.whole(held[0]), right[0] * 2)
    assert dist.get_rank() == rank
    (Path(folder) / f"done{rank}").touch()


def test_shards_of_two_ranks_are_gathered_placed_and_measured_as_one(tmp_path: Path) -> None:
    processes.run("tests.core.system.test_sharding:on_ranks", tmp_path)
    assert (tmp_path / "done0").is_file()
    assert (tmp_path / "done1").is_file()
