from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from plugins.core.compile.compiled_module import (
    CompiledModule,
    CompileRefused,
    preallocate_gradients,
    refuse_inside_autocast,
)
from plugins.core.compile.dynamic_shapes import Marker
from plugins.core.compile.toolchain import missing_compiler
from plugins.core.system import versions
from tests.core.compile.compiled import Counting, X, compiled
from tests.core.tiny import Mlp, mlp, same, snapshot


def raising(error: BaseException) -> Callable[..., Any]:
    def backend(*_: Any) -> Any:
        raise error

    return backend


def uncompiled(model: nn.Module) -> bool:
    return all(m._compiled_call_impl is None for m in model.modules())


# -- in place ---------------------------------------------------------------------


def test_keys_class_and_hooks_stay_the_hosts_own() -> None:
    model = mlp()
    keys, right = list(model.state_dict()), model(X)
    backend = Counting()
    with compiled(model, backend=backend) as (_, told):
        assert torch.equal(model(X), right)
        assert list(model.state_dict()) == keys
        assert type(model) is Mlp
        assert isinstance(model, Mlp)
        assert "_orig_mod" not in repr(model)
    assert backend.graphs == 1
    assert told == []


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_uncompiled(way: str) -> None:
    model = mlp()
    with compiled(model):
        right = model(X)
        if way == "deepcopy":
            copied = copy.deepcopy(model)
        elif way == "pickle":
            copied = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            assert b"InPlace" not in file.getvalue()
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        assert not uncompiled(model)
    assert type(copied) is Mlp
    assert uncompiled(copied)
    assert torch.equal(copied(X), right)


def test_undo_restores() -> None:
    model = mlp()
    before = dict(vars(model))
    backend = Counting()
    with compiled(model, backend=backend) as (part, _):
        assert part.active
    assert vars(model) == before
    assert uncompiled(model)
    assert not part.active
    model(X)
    assert backend.graphs == 0
    part.undo()  # twice is once


def test_undo_leaves_another_owners_compile_alone() -> None:
    model = mlp()
    with compiled(model):
        model.compile(backend="eager")
        theirs = model._compiled_call_impl
    assert model._compiled_call_impl is theirs


def test_calls_that_takes_refuses_stay_eager() -> None:
    class Either(Mlp):
        def forward(self, x: Any) -> Any:
            return super().forward(x["x"] if isinstance(x, dict) else x)

    model, backend = Either(), Counting()
    with compiled(model, backend=backend, takes=lambda args: isinstance(args[0], Tensor)):
        out = model({"x": X})
        assert backend.graphs == 0
        assert torch.equal(model(X), out)
        assert backend.graphs == 1


# -- errors ---------------------------------------------------------------------


def moved_once(model: Mlp, fresh: Mlp) -> bool:
    fresh(X)
    return same(snapshot(model), snapshot(fresh))


def test_a_backend_that_raises_ends_eagerly_once_and_counts_no_batch_twice() -> None:
    model = mlp(norm=True)
    right = mlp(norm=True)(X)
    with compiled(model, backend=raising(RuntimeError("no such op"))) as (part, told):
        out = model(X)
        assert torch.equal(out, right)
        assert moved_once(model, mlp(norm=True))
        out.sum().backward()
        model(X)
        assert not part.active
    assert len(told) == 1
    assert "no such op" in told[0]
    assert "\n" not in told[0]


class Broken(Mlp):
    """Two graphs: one until after BatchNorm, one behind it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.last(torch.tanh(x))


FROZEN = pytest.mark.skipif(not versions.ISOLATION.here, reason="this torch builds no graph for frozen weights")


@pytest.mark.parametrize("failing", [2, 4, pytest.param(5, marks=FROZEN)])
def test_an_error_behind_a_graph_break_counts_no_batch_twice(failing: int) -> None:
    """The first graph has run, and moved the statistics, when the second one's compile fails.

    Graphs of three calls: two of the first, two of a new batch size, and the second one's again in another mode.
    """
    torch.manual_seed(0)
    model = Broken(norm=True)
    right = copy.deepcopy(model)
    graphs = 0

    def fails(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        if graphs == failing:
            raise RuntimeError("second")
        return graph.forward

    with compiled(model, backend=fails, dynamic=False) as (_, told):
        for size, frozen in ((8, False), (4, False), (4, True)):
            model.last.weight.requires_grad_(not frozen)
            assert torch.equal(model(X[:size]), right(X[:size]))
            assert same(snapshot(model), snapshot(right))
    assert graphs == failing
    assert len(told) == 1


@pytest.mark.skipif(not versions.BACKWARD_AT_ONCE.here, reason=versions.BACKWARD_AT_ONCE.without)
def test_an_error_of_the_backward_compile_alone_ends_eagerly_too() -> None:
    fine = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=lambda graph, _: graph.forward)
    bad = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=raising(RuntimeError("backward")))
    right = mlp(norm=True)
    right(X).sum().backward()
    for backend, failures in ((fine, 0), (bad, 1)):
        torch._dynamo.reset()
        model = mlp(norm=True)
        with compiled(model, backend=backend) as (_, told):
            model(X).sum().backward()
            assert len(told) == failures
        assert int(model.norm.num_batches_tracked) == 1
        grads = {n: p.grad for n, p in model.named_parameters()}
        assert all(torch.allclose(grads[n], p.grad, atol=1e-6) for n, p in right.named_parameters())


@pytest.mark.parametrize("when", ["compile", "run"])
def test_running_out_of_memory_is_the_hosts_to_handle(when: str) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def backend(*_: Any) -> Any:
        if when == "compile":
            raise error
        return raising(error)

    model = mlp()
    with compiled(model, backend=backend) as (part, told):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            model(X)
        assert part.active
    assert told == []


def test_a_mistake_of_the_user_surfaces_as_the_eager_error() -> None:
    model = mlp()
    with pytest.raises(RuntimeError) as eager:
        model(X[:, :2])
    with compiled(model, backend="aot_eager"), pytest.raises(RuntimeError) as ours:
        model(X[:, :2])
    assert type(ours.value) is type(eager.value)
    assert str(ours.value) == str(eager.value)


def test_an_interrupt_is_not_swallowed() -> None:
    with compiled(mlp(), backend=raising(KeyboardInterrupt())) as (part, told), pytest.raises(KeyboardInterrupt):
        part.module(X)
    assert told == []


# -- autocast ---------------------------------------------------------------------


def test_compile_inside_autocast_is_refused_with_the_reason() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(CompileRefused, match="active autocast"):
            CompiledModule(mlp())
        with pytest.raises(CompileRefused, match="compile first"):
            refuse_inside_autocast()
    refuse_inside_autocast()


def test_called_inside_autocast_backward_outside() -> None:
    model = mlp()
    with compiled(model, backend="aot_eager") as (_, told):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(X)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
    assert told == []
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# -- gradients ---------------------------------------------------------------------


def test_gradients_are_allocated_before_capture() -> None:
    model = mlp()
    model.last.bias.requires_grad_(False)
    model.first.bias.grad = kept = torch.ones(5)
    preallocate_gradients(model)
    assert model.first.bias.grad is kept
    assert not model.first.weight.grad.any()
    assert model.last.bias.grad is None


# -- the compiler ---------------------------------------------------------------------


@pytest.mark.inductor
def test_the_real_compiler_called_inside_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing_compiler(torch.device("cpu"), "inductor"):
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model, eager = mlp(), mlp()
    with compiled(model, backend="inductor", marker=Marker([0])) as (part, told):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, right = model(X), eager(X)
        (out.float() ** 2).sum().backward()
        (right.float() ** 2).sum().backward()
        assert told == []
        assert part.active
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), right.float(), atol=2e-2)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.allclose(ours.grad, theirs.grad, rtol=5e-2, atol=5e-2)
    assert list((tmp_path / "cache").iterdir())
