"""examples/gpu_check.py as far as a CPU goes; tests/mirrored runs it on a second device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from examples import gpu_check
from plugins.core.system import devices


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_small_check_of_a_cpu_names_what_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--small"]) == 0
    shown = capsys.readouterr().out
    assert "resume inside a window: averaged weights off the straight run | 0.0e+00 | 0.0e+00" in shown
    assert "CUDA graphs, bf16 | not here: cpu has no CUDA graphs | 5 to 10 % more memory" in shown
    assert "compiled blocks, bf16 | not here: --small compiles nothing | 15 to 30 % faster" in shown
    assert "eager, fp16 | not here: precision=fp16: not on a CPU" in shown
    assert "failed" not in shown


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_device_that_is_not_here_is_one_line(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if devices.accelerator() == device:
        pytest.skip("it is here, and a check of minutes")
    assert gpu_check.main(["--device", device]) == 0
    assert capsys.readouterr().out == f"gpu_check: no {device.upper()} device here; nothing to check\n"


def test_rows_of_compiled_plans_run_through_a_compiler_that_ignores_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCEL_COMPILE_BACKEND", "eager")
    check = gpu_check.Check(devices.CPU, replace(gpu_check.SMALL, compiles=True, updates=2))
    monkeypatch.setattr(check, "needs", lambda kind, options: None)
    monkeypatch.setattr(gpu_check, "PLANS", {n: p for n, p in gpu_check.PLANS.items() if "fp16" not in n})
    rows = gpu_check.attempt(check.plans, tmp_path)
    assert [name for name, _, _ in rows] == list(gpu_check.PLANS)
    compiled = {name: (figures, claim) for name, figures, claim in rows if "compiled" in name or "graphs" in name}
    assert all("% speed" in figures and "% memory" in figures for figures, _ in compiled.values()), rows
    assert compiled["CUDA graphs, bf16"][1] == "usual claim: 5 to 10 % more memory"
    graphs = gpu_check.attempt(check.cuda_graphs_keep_gradients, tmp_path)
    assert [float(measured) <= 1e-4 for _, measured, _ in graphs] == [True, True], graphs


def test_check_that_fails_is_a_row_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume(self: object, folder: Path) -> None:
        raise RuntimeError("no such kernel\nlong text")

    monkeypatch.setattr(gpu_check.Check, "resume", resume)
    assert gpu_check.main(["--device", "cpu", "--small"]) == 1
    assert "resume | failed: RuntimeError: no such kernel | \n" in capsys.readouterr().out
