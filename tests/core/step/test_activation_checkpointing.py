"""When blocks are checkpointed, what that spares, and which are let go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.core.system import memory, versions
from tests.core.step.checkpointed import RAN, Net, Run, equal, standing

measured = pytest.mark.skipif(not versions.SAVED_TENSORS.here, reason=versions.SAVED_TENSORS.without)


@measured
def test_blocks_that_spare_least_for_their_time_are_let_go_after_the_first_window() -> None:
    run = Run()
    blocks = run.session.checkpointing.blocks
    run.step()
    kept = run.session.checkpointing.blocks
    assert len(kept) < len(blocks) == 5
    assert run.session.checkpointing.standing == f"on: {len(kept)} of 5 blocks, checkpointing=on"
    assert run.model.head[4] not in {part for block in kept for part in block.parts}  # Sigmoid keeps what it returns
    run.session.end()


@measured
def test_the_savings_are_the_bytes_that_a_block_would_have_kept() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10))
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).exp().square()  # keeps its input, the weight, and what exp gives

    run = Run(nn.Sequential(Squares(), Squares()))
    run.model(torch.randn(8, 2, 10, 10)).mean()
    assert run.session.checkpointing.savings.most == 2 * (8 * 2 * 10 * 10 * 4)
    run.session.end()


@measured
@pytest.mark.parametrize(("free", "stands"), [(1.0, False), (0.0, True)])
def test_auto_stays_only_where_the_batch_does_not_fit_without(
    free: float, stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_beyond_gib", lambda device, peak: free)
    run, plain = Run(checkpointing="auto"), []
    run.step()
    assert bool(standing(run.model)) is stands
    said = run.session.checkpointing.standing
    assert said.startswith("on: " if stands else "off: the batch fits without")
    assert "GiB" in said
    for _ in range(2):
        run.step()
    plain.append(run.trace())
    run.session.end()
    without = Run(checkpointing="off")
    for _ in range(3):
        without.step()
    equal(plain[0], without.trace())


def test_it_can_be_turned_on_between_windows() -> None:
    run, without = Run(checkpointing="off"), None
    run.step()
    assert run.session.checkpointing.enable("out of memory") is True
    assert run.session.checkpointing.enable("out of memory") is False
    run.step()
    run.step()
    found = run.trace()
    assert "out of memory" in run.session.checkpointing.standing
    assert len(RAN) > 9
    run.session.end()
    without = Run(checkpointing="off")
    for _ in range(3):
        without.step()
    equal(found, without.trace())


def test_a_model_that_checkpoints_by_itself_stays_as_it_is() -> None:
    model = Net()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    run = Run(model)
    assert standing(model) == []
    assert run.said == ["accel: checkpointing=on: the model's own gradient checkpointing is on, and stays"]
    run.session.end()


def test_a_model_without_blocks_is_told_once(tmp_path: Any) -> None:
    run = Run(nn.Linear(10, 10))
    assert run.said == ["accel: checkpointing=on: the model has no blocks that could run again"]
    run.step()
    run.session.end(tmp_path)
    assert run.session.report.memory.checkpointing == "off: the model has no blocks that could run again"
