from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plugins.core.system import malloc
from plugins.core.system.malloc import KEEP, RELEASE, UPDATES, FreedMemory

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
STEPS = """
import resource, torch
from plugins.core.system.malloc import UPDATES, FreedMemory

def step():
    parts = [torch.ones(2_000_000) for _ in range(12)]  # 96 MB in blocks of 8

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

freed = FreedMemory(torch.device("cpu"))
step()
freed.update_done(0.1)
host = faults()
for _ in range(UPDATES):
    step()
    freed.update_done(0.1)
step()
kept, held = faults(), resident()
freed.release()
print(host, kept, held - resident(), bool(freed.kept))
"""
GLIBC = pytest.mark.skipif(malloc._glibc() is None, reason="glibc's allocator alone")


@GLIBC
def test_kept_memory_saves_a_steps_page_faults_and_is_given_back() -> None:
    """In a process of its own: what the allocator holds depends on all that ran before."""
    done = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True, check=True)
    host, kept, given_back, was_kept = done.stdout.split()
    assert was_kept == "True"
    assert int(host) > 10_000
    assert int(kept) < int(host) / 4  # a block of 12 may not fit where it was
    assert int(given_back) > 80e6


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """What the allocator was told; it takes all. No run of another test holds it."""
    told: list[dict[int, int]] = []
    monkeypatch.setattr(malloc, "_holders", set())
    monkeypatch.setattr(malloc, "_set", lambda values: told.append(values) or True)
    return told


def run(monkeypatch: pytest.MonkeyPatch, faults: int, free: float = 8.0, device: torch.device = CPU) -> FreedMemory:
    """Updates of a tenth of a second with so many faults each, of a process of 2 GiB."""
    seen = iter(range(10))
    usage = lambda who: type("Usage", (), {"ru_minflt": faults * next(seen)})  # noqa: E731
    times = iter(range(10))
    monkeypatch.setattr(malloc.resource, "getrusage", usage)
    monkeypatch.setattr(malloc.time, "perf_counter", lambda: next(times) / 10)
    monkeypatch.setattr(malloc, "free_gib", lambda device: free)
    freed = FreedMemory(device)
    for _ in range(UPDATES + 2):
        freed.update_done(2.0)
    return freed


@GLIBC
def test_it_is_decided_once_by_the_faults_of_the_first_updates(
    monkeypatch: pytest.MonkeyPatch, values: list[dict[int, int]]
) -> None:
    freed = run(monkeypatch, faults=10_000)
    assert values == [KEEP]
    assert "10,000 page faults were about 15% of an update" in freed.kept
    freed.release()
    assert values == [KEEP, RELEASE]


@GLIBC
@pytest.mark.parametrize(
    ("faults", "free", "device"),
    [(3_000, 8.0, CPU), (10_000, 1.9, CPU), (10_000, 8.0, torch.device("cuda"))],
    ids=["few faults", "no memory free", "another device"],
)
def test_it_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, values: list[dict[int, int]], faults: int, free: float, device: torch.device
) -> None:
    freed = run(monkeypatch, faults, free, device)
    freed.release()
    assert values == []
    assert freed.kept == ""


def test_another_libc_has_nothing_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "_glibc", lambda: None)
    assert run(monkeypatch, faults=10_000).kept == ""
    assert not malloc._set(KEEP)


@GLIBC
def test_the_last_run_gives_back_also_where_nobody_ends_it(
    monkeypatch: pytest.MonkeyPatch, values: list[dict[int, int]]
) -> None:
    first, second = run(monkeypatch, faults=10_000), run(monkeypatch, faults=10_000)
    first.release()
    first.release()
    assert values == [KEEP, KEEP]
    del second
    gc.collect()
    assert values == [KEEP, KEEP, RELEASE]
