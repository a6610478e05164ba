"""Activation checkpointing changes memory and nothing else: weights, buffers, random numbers, what users wrote."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core.session import RunSpec, Session
from plugins.core.step.checkpointed_module import CheckpointedModule
from plugins.core.system import memory

RAN: list[str] = []  # forwards of blocks, second runs included


class Block(nn.Module):
    """Moves buffers and attributes, and draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(4, 1, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count, self.seen = 0, []  # type: int, list[int]

    def forward(self, x: Tensor) -> Tensor:
        RAN.append("block")
        self.count += 1
        self.calls = self.calls + 1
        self.seen.append(len(x))
        self.scale.mul_(1.01)
        drawn = random.random() + float(np.random.rand())
        return x + torch.relu(self.drop(self.norm(self.conv(x)))) * self.scale * (drawn + self.count)


class Net(nn.Module):
    """A stem, three blocks and a Sequential of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).mean((2, 3))
        return out


class Run:
    """A session on a small network; `step` is a micro-batch."""

    def __init__(self, model: nn.Module | None = None, size: int = 1, **options: Any) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        RAN.clear()
        self.model = (model if model is not None else Net()).train()
        self.said: list[str] = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        config = AccelConfig(**{"plan": "off", "compile": "off", "checkpointing": "on", **options})
        self.session = Session(
            RunSpec(
                config, "test", self.model, optimizer, torch.device("cpu"), micro_batch=8, size=size,
                say=self.said.append,
            )
        )  # fmt: skip
        self.draw = torch.Generator().manual_seed(1)

    def step(self, precision: torch.dtype | None = None, **arguments: Any) -> None:
        x = torch.randn(8, 2, 10, 10, generator=self.draw)
        self.session.micro_batch(len(x))
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = self.model(x, **arguments).float().square().mean()
        (loss * self.session.mean(len(x))).backward()
        self.session.backward_done()

    def trace(self) -> dict[str, Any]:
        """All that a step may change."""
        blocks = [m for m in self.model.modules() if isinstance(m, Block)]
        return {
            **self.model.state_dict(),
            "counts": torch.tensor([b.count for b in blocks]),
            "seen": torch.tensor([len(b.seen) for b in blocks]),
            "drawn": torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()])]),
        }


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def standing(model: nn.Module) -> list[CheckpointedModule]:
    return [m._compiled_call_impl for m in model.modules() if isinstance(m._compiled_call_impl, CheckpointedModule)]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_with_checkpointing_equals_the_run_without_bit_for_bit(size: int, precision: torch.dtype | None) -> None:
    traces = []
    for wanted in ("off", "on"):
        run = Run(size=size, checkpointing=wanted)
        for _ in range(4):
            run.step(precision)
        traces.append(run.trace())
        assert len(RAN) == 12 if wanted == "off" else len(RAN) > 12  # it did run again
        run.session.end()
    equal(*traces)


@pytest.mark.parametrize("scope", ["whole", "regional"])
def test_compiled_code_with_checkpointing_gives_the_same_weights(scope: str) -> None:
    traces = []
    for wanted in ("off", "on"):
        model = nn.Sequential(nn.Linear(10, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        run = Run(model, checkpointing=wanted, compile="on", compile_backend="aot_eager", compile_scope=scope)
        for _ in range(3):
            run.step()
        assert run.session.report.compile.decision == scope
        assert run.said == []
        traces.append(model.state_dict())
        run.session.end()
        assert all("_compiled_call_impl" not in vars(m) for m in model.modules())
    for name, value in traces[0].items():
        torch.testing.assert_close(traces[1][name], value, rtol=1e-6, atol=1e-7)


def test_a_block_that_is_set_to_evaluation_before_the_backward_runs_again_as_in_training() -> None:
    gradients = []
    for wanted in ("off", "on"):
        run = Run(checkpointing=wanted)
        loss = run.model(torch.randn(8, 2, 10, 10, generator=run.draw)).mean()
        run.model.eval()
        loss.backward()
        assert not any(m.training for m in run.model.modules())
        gradients.append({n: p.grad for n, p in run.model.named_parameters() if p.grad is not None})
        run.session.end()
    equal(*gradients)


def test_evaluation_and_forwards_without_gradient_are_not_touched() -> None:
    run = Run()
    x = torch.randn(8, 2, 10, 10)
    with torch.no_grad():
        run.model(x)
    run.model.eval()
    run.model(x).mean().backward()
    assert len(RAN) == 6
    run.session.end()


def test_a_copy_a_pickle_and_the_state_have_nothing_of_it_and_the_end_takes_it_off() -> None:
    run = Run()
    plain = Net()
    assert len(standing(run.model)) == 4
    for other in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        assert standing(other) == []
        assert [vars(m).keys() for m in other.modules()] == [vars(m).keys() for m in plain.modules()]
    assert run.model.state_dict().keys() == plain.state_dict().keys()
    run.step()
    run.session.end()
    assert [vars(m).keys() for m in run.model.modules()] == [vars(m).keys() for m in plain.modules()]


def test_a_hook_inside_a_block_runs_once_a_forward_and_that_block_keeps_its_activations() -> None:
    run = Run()
    heard: list[str] = []
    run.model.blocks[0].conv.register_forward_hook(lambda *_: heard.append("inside"))
    run.model.blocks[1].norm.register_forward_pre_hook(lambda *_: heard.append("inside"))
    run.step()
    run.step()
    assert heard == ["inside"] * 4
    assert len(RAN) == 8  # the third block's alone ran again
    assert len(run.said) == 1
    assert "blocks.0 keeps its activations: a forward hook" in run.said[0]
    run.session.end()


def test_hooks_on_a_block_itself_and_of_its_backward_run_once_and_it_is_checkpointed() -> None:
    run = Run()
    heard: list[str] = []
    for block in run.model.blocks:
        block.register_forward_pre_hook(lambda *_: heard.append("before"))
        block.register_forward_hook(lambda *_: heard.append("after"))
        block.norm.register_full_backward_hook(lambda *_: heard.append("backward"))
    run.step()
    assert sorted(heard) == ["after"] * 3 + ["backward"] * 3 + ["before"] * 3
    assert len(RAN) == 6
    assert run.said == []
    run.session.end()


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList(Filling() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        assert len(cache.held) == 2
        return x


class Cache:
    def __init__(self) -> None:
        self.held: list[Tensor] = []


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(10, 10), nn.Tanh()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.held.append(x)
        out: Tensor = self.act(self.linear(x)) * len(cache.held)
        return out


def test_a_block_that_fills_an_object_runs_once_and_one_line_says_so() -> None:
    run = Run(Remembering())
    run.step()
    run.step()
    assert [line for line in run.said if "Cache" in line] == run.said
    assert len(run.said) == 1
    run.session.end()


def test_blocks_that_spare_least_for_their_time_are_let_go_after_the_first_window() -> None:
    run = Run()
    blocks = run.session.checkpointing.blocks
    run.step()
    kept = run.session.checkpointing.blocks
    assert len(kept) < len(blocks) == 5
    assert run.session.checkpointing.standing == f"on: {len(kept)} of 5 blocks, checkpointing=on"
    assert run.model.head[4] not in {part for block in kept for part in block.parts}  # Sigmoid keeps what it returns
    run.session.end()


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
