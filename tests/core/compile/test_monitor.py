from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.callback as compile_callbacks
from torch import Tensor, nn

from plugins.core.compile import monitor as watching
from plugins.core.compile.monitor import CompileMonitor
from plugins.core.system import versions
from tests.core.tiny import mlp

X = torch.ones(4, 3)


@pytest.fixture
def monitor() -> Iterator[CompileMonitor]:
    found = CompileMonitor()
    found.start()
    yield found
    found.end()


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def test_nothing_compiled_nothing_counted(monitor: CompileMonitor) -> None:
    mlp()(X)
    assert (monitor.graphs, monitor.recompiles, monitor.graph_breaks, monitor.phases(), monitor.seconds) == (
        0,
        0,
        {},
        {},
        0.0,
    )


def test_graphs_recompiles_and_their_reasons(monitor: CompileMonitor) -> None:
    model = torch.compile(mlp(), backend="aot_eager", dynamic=False)
    model(X).sum().backward()
    assert (monitor.graphs, monitor.recompiles) == (1, 0)  # the backward's is not a graph of its own
    model(X)
    assert monitor.graphs == 1
    model(torch.ones(5, 3))
    assert (monitor.graphs, monitor.recompiles) == (2, 1)
    assert ("size mismatch" if versions.REASONS.here else "keeps no reasons") in monitor.recompile_reasons[0]
    assert monitor.seconds > 0


def test_graphs_by_the_phase_they_came_from(monitor: CompileMonitor) -> None:
    model = torch.compile(mlp(), backend="eager", dynamic=False)
    model(X)
    with monitor.in_phase("validation"), torch.no_grad():
        model(X)
        model(torch.ones(5, 3))
    model(torch.ones(6, 3))
    assert monitor.phases() == {"train": 2, "validation": 2}
    assert monitor.graphs == 2  # training's: the budget is for these
    with pytest.raises(KeyError), monitor.in_phase("validation"):
        raise KeyError
    assert monitor.phase == "train"


def test_graph_breaks_since_the_start(monitor: CompileMonitor) -> None:
    torch.compile(Breaking(), backend="eager")(X)
    assert monitor.graphs == 2
    assert sum(monitor.graph_breaks.values()) == 1
    assert "graph_break" in next(iter(monitor.graph_breaks))
    (line,) = monitor.graph_break_lines
    place, _, words = line.partition(": ")
    file, _, number = place.rpartition(":")
    assert Path(file).resolve() == Path(__file__).resolve()
    assert "graph_break()" in Path(__file__).read_text().splitlines()[int(number) - 1]
    assert words
    later = CompileMonitor()
    later.start()
    try:
        assert later.graph_breaks == {}
        assert later.graphs == 0
    finally:
        later.end()


def test_a_branch_on_data_is_a_graph_break_with_its_line(monitor: CompileMonitor) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        if y.mean() > 0:  # the line
            y = y * 2
        return y + 1

    torch.compile(branches, backend="eager")(torch.ones(3))
    assert sum(monitor.graph_breaks.values()) == 1
    (line,) = monitor.graph_break_lines
    number = line.removeprefix(f"{__file__}:").partition(":")[0]
    assert "# the line" in Path(__file__).read_text().splitlines()[int(number) - 1]
    later = CompileMonitor()
    later.start()
    try:
        assert later.graph_breaks == {}
        with later.in_phase("validation"):
            torch.compile(lambda x: x.sin() if x.sum() > 0 else x, backend="eager")(torch.ones(3))
        assert later.graph_breaks == {}
    finally:
        later.end()


def test_a_frame_that_fell_silently_back_to_eager_is_named(monitor: CompileMonitor) -> None:
    model = versions.compiled(mlp(), 2, isolate=False, backend="eager", dynamic=False)
    for size in (2, 3):
        model(torch.ones(size, 3))
    assert monitor.fell_to_eager == []
    model(torch.ones(4, 3))
    assert len(monitor.fell_to_eager) == 1
    assert "tiny.py" in monitor.fell_to_eager[0]
    assert "forward" in monitor.fell_to_eager[0]
    assert monitor.graphs == 2


def test_a_compile_that_fails_is_no_graph(monitor: CompileMonitor) -> None:
    def bad(*_: Any) -> Any:
        raise RuntimeError("bad")

    with pytest.raises(RuntimeError):
        torch.compile(mlp(), backend=bad)(X)
    assert monitor.graphs == 0


def test_rows_of_earlier_runs_do_not_count_even_where_torch_forgets_its_oldest(
    monitor: CompileMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compile(mlp(), backend="eager")(X)
    monkeypatch.setattr(watching, "ROWS_KEPT", 3)
    later = CompileMonitor()
    later.start()
    try:
        torch._dynamo.reset()
        model = torch.compile(mlp(), backend="eager", dynamic=False)
        for size in (2, 3):
            model(torch.ones(size, 3))
        assert later.graphs == 2
    finally:
        later.end()


def test_progress_while_it_compiles_and_once_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "TICK_SECONDS", 0.05)
    lines: list[tuple[float, int, bool]] = []
    monitor = CompileMonitor(lambda *line: lines.append(line))

    def slow(graph: torch.fx.GraphModule, _: Any) -> Any:
        time.sleep(0.4)
        return graph.forward

    monitor.start()
    try:
        torch.compile(mlp(), backend=slow)(X)
        during, after = lines[:-1], lines[-1]
        assert len(during) >= 2
        assert all(not done for _, _, done in during)
        assert [seconds for seconds, _, _ in during] == sorted(seconds for seconds, _, _ in during)
        assert after[1:] == (1, True)
        assert after[0] >= 0.4
        count = len(lines)
        time.sleep(0.15)
        assert len(lines) == count
    finally:
        monitor.end()


def test_end_takes_our_listeners_off_and_leaves_others() -> None:
    handler = compile_callbacks.callback_handler
    heard: list[Any] = []

    def hear(*told: Any) -> None:
        heard.append(told)

    handler.register_start_callback(hear)
    try:
        before = list(handler.start_callbacks), list(handler.end_callbacks)
        monitor = CompileMonitor(lambda *_: None)
        monitor.start()
        assert len(handler.start_callbacks) == len(before[0]) + 1
        monitor.end()
        monitor.end()
        assert (handler.start_callbacks, handler.end_callbacks) == before
        torch.compile(mlp(), backend="eager")(X)
        assert monitor.phases() == {}
        assert heard
    finally:
        handler.remove_start_callback(hear)


def test_the_cache_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    monkeypatch.setitem(watching.counters, "inductor", counts)
    assert CompileMonitor.cache() == ""
    counts["fxgraph_cache_miss"] = 1
    assert CompileMonitor.cache() == "cold"
    counts["fxgraph_cache_hit"] = 1
    assert CompileMonitor.cache() == "warm"
