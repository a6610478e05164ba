"""Each rank's own part of a sharded run's file. With ranks: `tests/loop/test_sharded.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core.checkpoint import by_rank
from plugins.core.checkpoint.by_rank import of_this_rank
from plugins.errors import AccelError

FILE = Path("run.pt")


def state(micro_batches: int = 0) -> dict[str, Any]:
    """As two ranks would have written it: buffer `mean` is each rank's own, `weight` is not."""
    own = [
        {"random": rank, "window": {"micro_batches": micro_batches, "samples": rank}, "kept_statistics": [rank],
         "model": {"mean": torch.tensor(float(rank))}, "shadow": {"mean": torch.tensor(rank + 0.5)}}
        for rank in (0, 1)
    ]  # fmt: skip
    model = {"weight": torch.ones(2), "mean": torch.tensor(0.0)}
    average = {"updates": 3, "shadow": {"weight": torch.zeros(2), "mean": torch.tensor(0.5)}}
    return {**own[0], "model": model, "average": average, "counts": {}, by_rank.FIELD: own}


def on(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": world}.items():
        monkeypatch.setattr(by_rank.dist, name, lambda value=value: value)


def test_a_rank_gets_its_own_counts_random_state_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, rank=1, world=2)
    found = of_this_rank(FILE, state(micro_batches=1))
    assert (found["random"], found["window"]["samples"], found["kept_statistics"]) == (1, 1, [1])
    assert (float(found["model"]["mean"]), float(found["average"]["shadow"]["mean"])) == (1.0, 1.5)
    assert torch.equal(found["model"]["weight"], torch.ones(2))
    assert found["average"]["updates"] == 3


def test_another_number_of_ranks_goes_on_between_two_windows_and_not_inside_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, rank=2, world=3)
    assert of_this_rank(FILE, state())["random"] == 0
    with pytest.raises(AccelError, match=r"run\.pt: saved by 2 ranks in the middle of a window") as error:
        of_this_rank(FILE, state(micro_batches=1))
    assert "\n" not in str(error.value)


def test_a_file_of_a_run_without_shards_is_taken_as_it_is() -> None:
    plain = {"random": 7, "window": {"micro_batches": 1}}
    assert of_this_rank(FILE, plain) == plain
