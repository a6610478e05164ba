from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.callback as compile_callbacks
from torch import Tensor, nn

from plugins.core import torch_versions
from plugins.core import watch as watching
from plugins.core.watch import Watch
from tests.core.tiny import mlp

X = torch.ones(4, 3)


@pytest.fixture
def watch() -> Iterator[Watch]:
    found = Watch()
    found.start()
    yield found
    found.end()


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def test_nothing_compiled_nothing_counted(watch: Watch) -> None:
    mlp()(X)
    assert (watch.graphs, watch.recompiles, watch.graph_breaks, watch.phases(), watch.seconds) == (0, 0, {}, {}, 0.0)


def test_graphs_recompiles_and_their_reasons(watch: Watch) -> None:
    model = torch.compile(mlp(), backend="aot_eager", dynamic=False)
    model(X).sum().backward()
    assert (watch.graphs, watch.recompiles) == (1, 0)  # the backward's is not a graph of its own
    model(X)
    assert watch.graphs == 1
    model(torch.ones(5, 3))
    assert (watch.graphs, watch.recompiles) == (2, 1)
    assert ("size mismatch" if torch_versions.REASONS.here else "keeps no reasons") in watch.recompile_reasons[0]
    assert watch.seconds > 0


def test_graphs_by_the_phase_they_came_from(watch: Watch) -> None:
    model = torch.compile(mlp(), backend="eager", dynamic=False)
    model(X)
    with watch.in_phase("validation"), torch.no_grad():
        model(X)
        model(torch.ones(5, 3))
    model(torch.ones(6, 3))
    assert watch.phases() == {"train": 2, "validation": 2}
    assert watch.graphs == 2  # training's: the budget is for these
    with pytest.raises(KeyError), watch.in_phase("validation"):
        raise KeyError
    assert watch.phase == "train"


def test_graph_breaks_since_the_start(watch: Watch) -> None:
    torch.compile(Breaking(), backend="eager")(X)
    assert watch.graphs == 2
    assert sum(watch.graph_breaks.values()) == 1
    assert "graph_break" in next(iter(watch.graph_breaks))
    (line,) = watch.graph_break_lines
    place, _, words = line.partition(": ")
    file, _, number = place.rpartition(":")
    assert Path(file).resolve() == Path(__file__).resolve()
    assert "graph_break()" in Path(__file__).read_text().splitlines()[int(number) - 1]
    assert words
    later = Watch()
    later.start()
    try:
        assert later.graph_breaks == {}
        assert later.graphs == 0
    finally:
        later.end()


def test_a_frame_that_fell_silently_back_to_eager_is_named(watch: Watch) -> None:
    model = torch_versions.compiled(mlp(), 2, isolate=False, backend="eager", dynamic=False)
    for size in (2, 3):
        model(torch.ones(size, 3))
    assert watch.fell_to_eager == []
    model(torch.ones(4, 3))
    assert len(watch.fell_to_eager) == 1
    assert "tiny.py" in watch.fell_to_eager[0]
    assert "forward" in watch.fell_to_eager[0]
    assert watch.graphs == 2


def test_a_compile_that_fails_is_no_graph(watch: Watch) -> None:
    def bad(*_: Any) -> Any:
        raise RuntimeError("bad")

    with pytest.raises(RuntimeError):
        torch.compile(mlp(), backend=bad)(X)
    assert watch.graphs == 0


def test_rows_of_earlier_runs_do_not_count_even_where_torch_forgets_its_oldest(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compile(mlp(), backend="eager")(X)
    monkeypatch.setattr(watching, "ROWS_KEPT", 3)
    later = Watch()
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
    watch = Watch(lambda *line: lines.append(line))

    def slow(graph: torch.fx.GraphModule, _: Any) -> Any:
        time.sleep(0.4)
        return graph.forward

    watch.start()
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
        watch.end()


def test_end_takes_our_listeners_off_and_leaves_others() -> None:
    handler = compile_callbacks.callback_handler
    heard: list[Any] = []

    def hear(*told: Any) -> None:
        heard.append(told)

    handler.register_start_callback(hear)
    try:
        before = list(handler.start_callbacks), list(handler.end_callbacks)
        watch = Watch(lambda *_: None)
        watch.start()
        assert len(handler.start_callbacks) == len(before[0]) + 1
        watch.end()
        watch.end()
        assert (handler.start_callbacks, handler.end_callbacks) == before
        torch.compile(mlp(), backend="eager")(X)
        assert watch.phases() == {}
        assert heard
    finally:
        handler.remove_start_callback(hear)


def test_the_cache_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    monkeypatch.setitem(watching.counters, "inductor", counts)
    assert Watch.cache() == ""
    counts["fxgraph_cache_miss"] = 1
    assert Watch.cache() == "cold"
    counts["fxgraph_cache_hit"] = 1
    assert Watch.cache() == "warm"
