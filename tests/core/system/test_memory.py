from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from plugins.core.system import memory
from plugins.core.system.memory import Peaks
from plugins.core.system.shortage import GIB

CPU = torch.device("cpu")
MIB_256 = 256 * 1024**2


def test_the_first_update_and_the_steady_ones_are_measured_apart() -> None:
    peaks = Peaks(CPU)
    assert peaks.kind == "rss"
    large = mmap.mmap(-1, MIB_256)  # not of the allocator, which may have so much to give again
    for page in range(0, MIB_256, mmap.PAGESIZE):
        large[page] = 1
    large.close()
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


def group(folder: Path, limit: str, use: int, cached: int, version: int = 2) -> None:
    """A control group's files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, value in zip(names, (limit, use), strict=True):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    total = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{total}inactive_file {cached}\n")


@pytest.mark.parametrize(
    ("version", "line", "place"),
    [
        (2, "0::/", "."),
        (2, "0::/user.slice/run.scope", "user.slice/run.scope"),
        (2, "0::/user.slice/run.scope", "user.slice"),  # the limit of the one that holds it
        (1, "4:memory:/docker/ab", "memory"),  # inside the container, its own group is the mount
        (1, "7:cpu,memory:/docker/ab", "memory/docker/ab"),
    ],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, line: str, place: str
) -> None:
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_MOUNT", tmp_path)
    assert memory._left_of_container() == float("inf")
    group(tmp_path / place, str(3 * 2**20), 2 * 2**20, 2**19, version)
    assert memory.free_gib(CPU) == 1.5 / 1024
    assert memory.limit_gib(CPU) == 3 / 1024
    group(tmp_path / place, str(2**20), 2 * 2**20, 0, version)
    assert memory.free_gib(CPU) == 0
    group(tmp_path / place, "max", 2 * 2**20, 0, version)
    assert memory._left_of_container() == float("inf")


def test_without_control_groups_the_machines_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "none")
    assert memory._left_of_container() == float("inf")
    assert memory.free_gib(CPU) > 0
    assert memory.limit_gib(CPU) == memory.psutil.virtual_memory().total / GIB
