"""The host's own DDP, its command and its generated script on two CPU ranks: one big batch, and equal resumes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.ultralytics import ranks as host_ranks
from tests import processes
from tests.ultralytics.conftest import same
from tests.ultralytics.spy import off_the_big_batch
from tests.ultralytics.two_ranks import KEPT

IMAGES = 14  # in batches of 2 + 2, the last of 1 + 1; windows of 3 and of 1 micro-batches, for they end with an epoch
WINDOWS = [3, 1] * 2
Start = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(
    data: Callable[..., Path], models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """(a straight run of two epochs, one resumed from its first epoch's checkpoint, what the host printed)."""
    settings = str(tmp_path_factory.mktemp("settings"))

    def start(folder: Path, resume: str = "") -> tuple[list[dict[str, Any]], str]:
        command = [sys.executable, "-m", "tests.ultralytics.two_ranks", str(models("detect")),
                   str(data(IMAGES, empty=(1, 5))), str(folder), "run", "3", *([resume] if resume else [])]  # fmt: skip
        environment = {"NOTES": str(folder), "YOLO_OFFLINE": "1", "YOLO_CONFIG_DIR": settings}
        printed = processes.launch(command, folder / "log", 300, **environment)
        files = sorted(folder.glob("run-*.pt"))
        return [torch.load(file, weights_only=False) for file in files], printed

    folder = tmp_path_factory.mktemp("straight")
    straight, printed = start(folder)
    resumed, _ = start(tmp_path_factory.mktemp("resumed"), str(folder / KEPT / "last.pt"))
    return straight, resumed, printed


def test_workers_of_the_generated_script_hold_the_callbacks_with_their_settings(runs: Any) -> None:
    straight, _, printed = runs
    assert "DDP: " in printed.replace("\x1b[0m", "")
    assert "torch.distributed.run --nproc_per_node 2" in printed
    assert [worker["size"] for worker in straight] == [3, 3]


def test_two_ranks_are_the_big_batch_ragged_windows_and_images_without_objects_included(runs: Any) -> None:
    first, second = runs[0]
    assert same(first["weights"], second["weights"])
    assert [len(update.batches) for update in first["updates"]] == WINDOWS
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert same(ours.gradients, theirs.gradients)
        assert off_the_big_batch(ours.gradients, ours.model, ours.batches + theirs.batches) <= 1e-6


def test_a_resumed_run_on_two_ranks_is_the_straight_one_bit_for_bit(runs: Any) -> None:
    straight, resumed, _ = runs
    for ours, right in zip(resumed, straight, strict=True):
        assert len(ours["updates"]) == 2
        for update, other in zip(ours["updates"], right["updates"][2:], strict=True):
            assert same(update.gradients, other.gradients)
        assert same(ours["weights"], right["weights"])


def test_a_rank_takes_up_its_own_part_of_the_state_and_the_first_one_that_of_its_save(monkeypatch: Any) -> None:
    state = {"random": "of the save", "ranks": [{"random": "of rank 0"}, {"random": "of rank 1"}]}
    monkeypatch.setattr(host_ranks, "several", lambda trainer: True)
    monkeypatch.setattr(host_ranks.dist, "get_world_size", lambda: 2)
    for rank, expected in ((0, "of the save"), (1, "of rank 1")):
        monkeypatch.setattr(host_ranks, "RANK", rank)
        assert host_ranks.of_this_rank(None, state)["random"] == expected
    monkeypatch.setattr(host_ranks.dist, "get_world_size", lambda: 3)  # saved by another number of ranks
    assert host_ranks.of_this_rank(None, state)["random"] == "of the save"
