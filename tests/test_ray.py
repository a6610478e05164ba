"""Ray Train as the launcher: what runs under torchrun runs in its workers, unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests import processes, reference

pytest.importorskip("ray.train.torch", reason="pip install 'accel-plugins[ray]'")
pytestmark = pytest.mark.slow  # Ray alone takes most of a minute to start


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    more = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(tmp_path_factory.mktemp("r"))}
    command = [sys.executable, "-m", "tests.ray_workers", str(folder)]
    processes.launch(command, folder / "log", 420, **more)
    return folder


def test_a_loop_of_two_workers_is_one_big_batch(found: Path) -> None:
    from tests.ray_workers import head, rows

    x, y = (torch.cat(parts) for parts in zip(rows(0), rows(1), strict=True))
    model = head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for worker in (0, 1):
        ours = torch.load(found / f"loop{worker}.pt", weights_only=True)
        assert ours["updates"] == 1
        assert reference.difference(ours["model"], dict(model.state_dict())) <= 1e-6


def test_a_trainer_of_two_workers_is_one_big_batch(found: Path) -> None:
    from tests.huggingface.heads import batch_for, model_for

    right = reference.gradients(
        model_for("bert-token"), batch_for("bert-token", 6, uneven=True), lambda model, batch: model(**batch).loss
    )
    for worker in (0, 1):
        ours = torch.load(found / f"trainer{worker}.pt", weights_only=True)
        assert reference.difference(ours["gradients"], right) <= 1e-6
        assert (ours["report"]["updates"], ours["report"]["exact"]) == (1, True)
