from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plugins.core import memory
from plugins.core.memory import Peaks

CPU = torch.device("cpu")
MIB_256 = 64 * 1024**2  # float32 elements


def test_the_first_update_and_the_steady_ones_are_measured_apart() -> None:
    peaks = Peaks(CPU)
    assert peaks.kind == "rss"
    large = torch.ones(MIB_256)
    del large
    peaks.update_done()
    first = peaks.first_gib
    assert first is not None
    peaks.update_done()
    assert peaks.first_gib == first
    peaks.end()
    assert peaks.steady_gib is not None
    try:
        memory._CLEAR.write_text("5")
    except OSError:
        pytest.skip("no resident peak that a process can reset")
    assert 0.2 < first - peaks.steady_gib < 0.3


def test_a_run_without_an_update_has_no_steady_peak() -> None:
    peaks = Peaks(CPU)
    peaks.end()
    assert peaks.first_gib is None
    assert peaks.steady_gib is None


def test_without_proc_the_peak_is_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "folder")
    peaks = Peaks(CPU)
    peaks.update_done()
    assert 0.01 < peaks.first_gib < 1000
