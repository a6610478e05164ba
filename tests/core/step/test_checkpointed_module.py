"""Activation checkpointing changes memory and nothing else: weights, buffers, random numbers, what users wrote."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.core.step.checkpointed import RAN, Net, Run, equal, standing


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
