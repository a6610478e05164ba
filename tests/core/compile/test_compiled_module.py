from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from plugins.core.compile.compiled_module import (
    CompiledModule,
    CompileRefused,
    preallocate_gradients,
    refuse_inside_autocast,
)
from plugins.core.compile.dynamic_shapes import Marker
from plugins.core.compile.monitor import CompileMonitor
from plugins.core.compile.scope import matching
from plugins.core.compile.toolchain import missing_compiler
from plugins.core.step.blocks import regions
from plugins.core.system import versions
from tests.core.tiny import Mlp, mlp, same, snapshot

X = torch.linspace(-1, 1, 24).reshape(8, 3)


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def raising(error: BaseException) -> Callable[..., Any]:
    def backend(*_: Any) -> Any:
        raise error

    return backend


@contextmanager
def compiled(module: nn.Module, **options: Any) -> Iterator[tuple[CompiledModule, list[str]]]:
    told: list[str] = []
    part = CompiledModule(module, **{"backend": "eager", "give_up": lambda fault: told.append(fault.reason), **options})
    part.install()
    try:
        yield part, told
    finally:
        part.undo()


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


# -- bounded shapes ---------------------------------------------------------------------


class Widths(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * x.shape[1]


class Specialises(nn.Module):
    """Has another form at width 6: a strict mark of the width cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.shape[1] == 6 else x.mean(1)


def test_a_strict_mark_is_one_graph_for_all_widths() -> None:
    backend = Counting()
    with compiled(Widths(), backend=backend, marker=Marker([1])) as (part, told):
        for width in (4, 7, 5, 9, 12):
            x = torch.randn(2, width)
            assert torch.equal(part.module(x), Widths()(x))
        assert part.marker.way == "strict"
    assert backend.graphs == 1
    assert told == []


def test_a_mark_that_cannot_hold_becomes_a_wish(capfd: pytest.CaptureFixture[str]) -> None:
    with compiled(Specialises(), marker=Marker([1])) as (part, told):
        for width in (6, 4, 5, 6, 7):
            x = torch.randn(2, width)
            assert torch.equal(part.module(x), Specialises()(x))
        assert part.active
        assert part.marker.way == "maybe"
    assert told == []
    assert "ConstraintViolation" not in capfd.readouterr().err


def test_where_no_mark_holds_there_is_one_static_graph_a_size() -> None:
    refused: list[str] = []
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if len(refused) < 2:
            refused.append(str(inputs))
            raise ConstraintViolationError("specialized it to be a constant (4)")
        graphs.append([i for i in inputs if isinstance(i, (int, torch.SymInt))])
        return graph.forward

    with compiled(Widths(), backend=backend, marker=Marker([1])) as (part, told):
        for width in (4, 7, 4, 5, 7):
            x = torch.randn(2, width)
            assert torch.equal(part.module(x), Widths()(x))
        assert part.marker.way == "static"
        assert part.active
    assert told == []
    assert graphs == [[], [], []]  # three sizes, none of them symbolic


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


# -- which modules ---------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_regions_are_the_repeated_blocks_and_not_what_is_inside_them() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    model.one = nn.ModuleList([block()])
    model.uneven = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])
    assert regions(model) == list(model.blocks)
    assert regions(mlp()) == []


def test_regions_are_found_in_a_module_dict_and_as_attributes_but_plain_layers_are_no_blocks() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    class Attributes(nn.Module):
        def __init__(self, make: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.first, self.second, self.other = make(), make(), nn.Linear(4, 2)

    model = nn.Module()
    model.named = nn.ModuleDict({name: Attention() for name in "abc"})
    assert regions(model) == list(model.named.values())
    assert regions(Attention()) == []
    plain = Attributes(Attention)
    assert regions(plain) == [plain.first, plain.second]
    towers = Attributes(lambda: nn.Sequential(*[Attention() for _ in range(3)]))
    assert regions(towers) == [*towers.first, *towers.second]  # the smaller blocks, not the towers
    nested = Attributes(lambda: Attributes(Attention))
    assert regions(nested) == [nested.first, nested.second]


def test_identical_blocks_share_one_graph() -> None:
    model, backend = nn.Sequential(*[block() for _ in range(12)]), Counting()
    parts = [CompiledModule(b, backend=backend, isolate=False, limit=2) for b in regions(model)]
    assert len(parts) == 12
    for part in parts:
        part.install()
    x = torch.randn(2, 4)
    model(x)
    assert all(part.active for part in parts)
    assert backend.graphs <= 2


def test_twelve_different_modules_are_twelve_graphs_and_none_is_silently_eager() -> None:
    """They share one code object, whose limit is 8 graphs."""
    monitor, backend = CompileMonitor(), Counting()
    monitor.start()
    try:
        for width in range(1, 13):
            with compiled(nn.Linear(3, width), backend=backend) as (part, told):
                part.module(X)
                assert part.active
                assert told == []
        assert backend.graphs == monitor.graphs == 12
        assert monitor.fell_to_eager == []
    finally:
        monitor.end()


def test_names_that_match_and_those_that_are_excluded() -> None:
    model = mlp(norm=True)
    assert matching(model, ["first", "l*"], []) == [model.first, model.last]
    assert matching(model, ["*s*"], ["last"]) == [model.first]
    assert matching(model, ["no"], []) == []


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
