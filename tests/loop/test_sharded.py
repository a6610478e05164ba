"""A loop whose model `fully_shard` shards over two ranks: one big batch, one norm, whole files, equal resumes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import processes, reference
from tests.core.tiny import same
from tests.sharded_ranks import OPTIONS, net, parts


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    processes.run("tests.sharded_ranks:train", folder)
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def right():
    """(model, norms) of one process with the big batches."""
    model, norms = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for at in (0, 2):
            window = [part for rank in (0, 1) for part in parts(rank)[at : at + 2]]
            x, y = (torch.cat(tensors) for tensors in zip(*window, strict=True))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["clip_norm"])))
            optimizer.step()
    return model, norms


def test_two_ranks_are_one_big_batch_clipped_by_the_norm_of_all_shards(found, right):
    folder, ranks = found
    model, norms = right
    for ours in ranks:
        assert ours["norms"] == pytest.approx(norms, rel=1e-6)
        assert (ours["report"]["window"]["updates"], ours["report"]["window"]["exact"]) == (4, True)
    saved = torch.load(folder / "whole.pt", weights_only=True)
    assert reference.difference(saved["model"], dict(model.state_dict())) <= 1e-6
    assert same(ranks[0]["average"], ranks[1]["average"])
    assert same(saved["average"]["shadow"]["0.weight"], ranks[0]["average"]["0.weight"])


def test_a_run_resumed_in_the_middle_of_a_window_is_the_uninterrupted_one(found):
    folder, ranks = found
    whole, resumed = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("whole", "resumed"))
    for part in ("model", "optimizer", "average"):
        assert same(whole[part], resumed[part]), part
    assert all(ours["extra"] == {"at": 3} for ours in ranks)
    assert all(ours["drawn"] for ours in ranks)  # each rank's own random state


def test_a_nan_on_one_rank_is_skipped_on_all(found):
    for ours in found[1]:
        assert (ours["skipped"], ours["kept"], ours["average_kept"]) == (False, True, True)


def test_a_rank_without_targets_takes_part_in_the_backward(found):
    first, second = (ours["empty"] for ours in found[1])
    assert first == second > 0


def test_another_storage_order_of_shards_is_refused_in_one_line(found):
    for ours in found[1]:
        assert ours["layout"].startswith("memory_format=channels_last: fully_shard ")
        assert "\n" not in ours["layout"]


def test_compiled_shards_have_the_eager_gradients(found):
    for ours in found[1]:
        assert ours["compiled"] == pytest.approx(ours["norms"][2:], rel=1e-5)
        assert ours["compile"]["decision"] == "regional"
        assert 1 <= ours["compile"]["graphs"] <= ours["compile"]["budget"]
