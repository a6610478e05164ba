from __future__ import annotations

import errno
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core import checkpoint
from plugins.core.checkpoint import atomic_file
from plugins.core.checkpoint.atomic_file import AtomicPath, write_atomically
from tests.core.checkpoint.conftest import NEW, OLD, fail

ROOT = Path(__file__).parents[2]


# -- atomic writes --------------------------------------------------------------------------------------------------


def test_a_write_takes_the_files_place(file: Path) -> None:
    write_atomically(file, lambda out: out.write(NEW))
    assert file.read_bytes() == NEW
    assert [f.name for f in file.parent.iterdir()] == ["last.pt"]


def half_then_fail(out: Any) -> None:
    out.write(NEW[: len(NEW) // 2])
    fail()


@pytest.mark.parametrize("stage", ["open", "write", "flush", "fsync", "mode", "replace"])
def test_a_full_disk_at_any_stage_leaves_the_old_file_bitwise(
    stage: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = {"open": (atomic_file.tempfile, "mkstemp"), "fsync": (os, "fsync"), "replace": (Path, "replace")}
    owner["mode"] = (Path, "chmod")
    with monkeypatch.context() as patched:
        if stage in owner:
            patched.setattr(*owner[stage], fail)
        writes = {"write": half_then_fail, "flush": lambda out: setattr(out, "flush", fail) or out.write(NEW)}
        if stage == "flush":  # the buffer's last part goes out as the file closes
            writes["flush"] = half_then_fail
        with pytest.raises(OSError) as caught:
            write_atomically(file, writes.get(stage, lambda out: out.write(NEW)))
    assert caught.value.errno == errno.ENOSPC
    assert str(file) in str(caught.value)
    assert file.read_bytes() == OLD
    assert [f.name for f in file.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_an_error_of_the_writer_passes_through(error: BaseException, file: Path) -> None:
    def write(out: Any) -> None:
        out.write(b"half")
        raise error

    with pytest.raises(type(error)) as caught:
        write_atomically(file, write)
    assert caught.value is error
    assert file.read_bytes() == OLD
    assert [f.name for f in file.parent.iterdir()] == ["last.pt"]


def test_a_disk_that_fills_up_under_torch_save_is_told_as_such(file: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(file))) as caught:
            write_atomically(file, lambda out: torch.save({"weight": torch.zeros(10000)}, out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG  # the limit of a file stands for the end of the disk
    assert file.read_bytes() == OLD
    assert [f.name for f in file.parent.iterdir()] == ["last.pt"]


def test_an_error_without_a_number_keeps_its_words(file: Path) -> None:
    def write(_: Any) -> None:
        raise OSError("the server went away")

    with pytest.raises(OSError, match="the server went away") as caught:
        write_atomically(file, write)
    assert "last.pt" in str(caught.value)
    assert "None" not in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no"):
        write_atomically(tmp_path / "no" / "last.pt", lambda out: out.write(NEW))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_the_mode_of_the_old_file_is_kept(mode: int, file: Path) -> None:
    file.chmod(mode)
    write_atomically(file, lambda out: out.write(NEW))
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_an_ordinary_write(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (tmp_path / "plain").write_bytes(NEW)
        write_atomically(tmp_path / "ours", lambda out: out.write(NEW))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")]
    assert modes == [0o640, 0o640]


WRITER = """
import io, sys, torch
from pathlib import Path
from plugins.core.checkpoint import AtomicPath, drop_sidecars, save_sidecar
torch.set_num_threads(1)
path = AtomicPath(sys.argv[1])
n = 0
while True:
    n += 1
    buffer = io.BytesIO()
    torch.save({"n": n, "weights": torch.full((50_000,), float(n))}, buffer)
    extra = save_sidecar(path, buffer.getbuffer(), {"n": n})
    path.write_bytes(buffer.getbuffer())
    drop_sidecars(path, keep=extra)
    print(n, flush=True)
"""


def test_killed_at_any_instant_a_loadable_file_and_its_own_extra_state_remain(tmp_path: Path) -> None:
    file, draw = tmp_path / "last.pt", random.Random(0)
    last = 0
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert writer.stdout is not None
        writer.stdout.readline()  # one is written whole
        time.sleep(draw.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = torch.load(file, weights_only=True)
        assert bool((found["weights"] == found["n"]).all())
        extra = checkpoint.load_sidecar(file)
        assert extra is not None
        assert extra["n"] == found["n"]
        last = max(last, found["n"])
    assert last > 1
    checkpoint.sweep(tmp_path)
    assert list(tmp_path.glob(".*")) == []
    assert file.exists()


# -- paths ------------------------------------------------------------------------------------------------------------


def test_children_of_an_atomic_path_are_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = AtomicPath(tmp_path) / "epoch1.pt"
    assert isinstance(child, AtomicPath)
    assert child == tmp_path / "epoch1.pt"
    assert child.write_bytes(OLD) == len(OLD)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match=r"epoch1\.pt"):
        child.write_bytes(NEW)
    assert child.read_bytes() == OLD


def test_around_is_of_one_path_and_sees_the_data(tmp_path: Path) -> None:
    seen: list[Any] = []

    @contextmanager
    def around(path: Path, data: memoryview) -> Any:
        seen.append((path, bytes(data), path.exists()))
        yield
        seen.append(path.read_bytes())

    folder = AtomicPath(tmp_path)
    last = folder / "last.pt"
    last.around = around
    last.write_bytes(NEW)
    (folder / "best.pt").write_bytes(OLD)
    assert seen == [(last, NEW, False), NEW]
