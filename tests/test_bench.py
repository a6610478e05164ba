"""`accel bench`: alike loops, in turn, and nothing left behind."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from plugins import bench, cli
from plugins.core.autotune import cost_model
from plugins.core.plan import Plan, Timing

CPU = torch.device("cpu")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Small models, on a CPU that is fast in bf16; what the bench warns of."""
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    blocks = {"tiny": (lambda: nn.Sequential(*(bench.Gated(8) for _ in range(2))), (2, 4, 8))}
    residual = {"images": (lambda: nn.Sequential(bench.Residual(4), bench.Residual(4)), (2, 4, 8, 8))}
    monkeypatch.setattr(bench, "KINDS", {**blocks, **residual, "encoder": blocks["tiny"]})
    return []


def run(kind: str, warnings: list[str], updates: int = 3, compiled: bool = False) -> dict[str, bench.Contender]:
    found = bench.bench(kind, updates, compiled, CPU, lambda line: None, warnings.append)
    return {one.name: one for one in found}


def test_what_a_run_would_try_here_is_timed(warnings: list[str]) -> None:
    found = run("images", warnings)
    assert list(found) == ["plain loop", "accel", "bf16 + channels_last", "channels_last", "bf16"]
    assert list(run("tiny", warnings)) == ["plain loop", "accel", "bf16"]
    assert warnings == []
    for one in found.values():
        assert len(one.timing.seconds) == 3
        assert one.timing.first > 0


@pytest.mark.parametrize("updates", [1, bench.CHUNK, 2 * bench.CHUNK + 1])
def test_every_contender_makes_as_many_updates(warnings: list[str], updates: int) -> None:
    assert {len(one.timing.seconds) for one in run("tiny", warnings, updates).values()} == {updates}


def test_the_loops_are_alike(warnings: list[str], tmp_path: Path) -> None:
    build, shape = bench.KINDS["tiny"]
    ours, plain, batch = build(), build(), torch.randn(shape)
    ours.load_state_dict(plain.state_dict())
    for steps in (bench.plain(plain, batch), bench.plugged(ours, batch, Plan(), str(tmp_path))):
        assert all(seconds > 0 for seconds in islice(steps, 4))
        steps.close()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


def test_nothing_of_the_folder_or_the_environment_counts(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accel.yaml").write_text("accumulate: 3\nemaa: 1\n", encoding="utf-8")
    monkeypatch.setenv("ACCEL_CLIP_NORM", "0.1")
    test_the_loops_are_alike(warnings, tmp_path)
    assert len(run("tiny", warnings)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accel.yaml"]


def test_a_plan_that_fails_is_left_out(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "plans", lambda *args: [Plan("bf16"), Plan("fp16"), Plan(compile="regional")])
    monkeypatch.setattr("plugins.core.compile.compiled_module.torch.compile", lambda *args, **kwargs: _fails)
    found = run("tiny", warnings, compiled=True)
    assert list(found) == ["plain loop", "bf16"]
    assert len(warnings) == 2
    assert all("left out" in line and "\n" not in line for line in warnings)


def _fails(*args: object, **kwargs: object) -> None:
    raise RuntimeError("no compiler today")


def test_compiled_blocks_through_inductor(warnings: list[str]) -> None:
    found = run("tiny", warnings, compiled=True)
    assert list(found) == ["plain loop", "accel", "bf16", "regional compile", "bf16 + regional compile"]
    assert found["regional compile"].timing.first > found["accel"].timing.first
    assert all(module._compiled_call_impl is None for module in bench.KINDS["tiny"][0]().modules())


def test_a_first_update_is_won_back() -> None:
    plain, fast, alike = (
        bench.Contender("", Timing(Plan(), seconds=[s, s * 1.02], first=first), iter(()))  # type: ignore[arg-type]
        for s, first in ((1.0, 1.0), (0.5, 6.0), (0.999, 1.0))
    )
    assert fast.against(plain) == pytest.approx(0.5)
    assert fast.pays(plain) == 10  # 5 s at half a second an update
    assert alike.pays(plain) is None
    assert plain.pays(plain) is None


def test_the_command(warnings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["accel", "bench", "encoder", "--updates", "5", "--no-compile"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "plain loop" in out
    assert "bf16" in out


def test_the_command_names_every_kind() -> None:
    assert set(bench.KINDS) == set(cli.Kind.__args__)  # type: ignore[attr-defined]
