"""examples/gpu_check.py on mirror: what a GPU would refuse is refused here."""

from __future__ import annotations

import pytest

from examples import gpu_check


def test_small_check_of_mirror_fails_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "mirror", "--small"]) == 0
    shown = capsys.readouterr().out
    assert "| skipped True, weights kept True, scale 512, then stepped True |" in shown
    assert "averaged weights off the straight run | 0.0e+00 |" in shown
    assert "eager, fp16 | not here" not in shown
    assert "CUDA graphs, bf16 | not here: mirror has no CUDA graphs" in shown
