"""A hand-written loop over three ranks with unequal counts of batches: one big batch a window, and never a hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import loop_ranks, processes
from tests.loops import net, off


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks = len(loop_ranks.PARTS)
    processes.run("tests.loop_ranks:train", folder, ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def test_unequal_counts_of_batches_equal_the_big_batch_also_beside_the_model(found):
    right, own = net(seed=0), loop_ranks.head(0)
    optimizer = torch.optim.SGD([*right.parameters(), own], lr=0.1, momentum=0.9)
    ranks = []
    for rank, sizes in enumerate(loop_ranks.PARTS):
        x, y = loop_ranks.data(sum(sizes), seed=rank)
        ranks.append(list(zip(x.split(sizes), y.split(sizes), strict=True)))
    for _ in range(2):
        for at in (0, 2, 4):
            window = [part for rank in ranks for part in rank[at : at + 2]]
            x, y = (torch.cat(tensors) for tensors in zip(*window, strict=True))
            optimizer.zero_grad()
            F.cross_entropy(right(x) * own, y).backward()
            nn.utils.clip_grad_norm_([*right.parameters(), own], 0.5)
            optimizer.step()
    for ours in found:
        model = net()
        model.load_state_dict(ours["model"])
        assert ours["updates"] == 6
        assert off(model, right) < 2e-6
        assert (ours["own"] - own.detach()).abs().max() < 2e-6
    for part in ("model", "average"):
        for other in found[1:]:
            assert all(torch.equal(value, other[part][name]) for name, value in found[0][part].items())


def test_a_rank_that_left_without_flush_is_one_line_on_the_others(found):
    assert "another rank has left the run" in found[0]["told"]
    assert "call flush() on every rank" in found[0]["told"]
    assert "\n" not in found[0]["told"]
