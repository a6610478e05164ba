from __future__ import annotations

import errno
import io
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from plugins.core import checkpoint
from plugins.core.checkpoint import atomic_file, sidecar
from plugins.core.checkpoint.atomic_file import AtomicPath, write_atomically
from tests.core.tiny import mlp, same

ROOT = Path(__file__).parents[2]
OLD, NEW = b"old" * 1000, b"new" * 5000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "last.pt"
    found.write_bytes(OLD)
    return found


# -- atomic writes --------------------------------------------------------------------------------------------------


def test_a_write_takes_the_files_place(file: Path) -> None:
    write_atomically(file, lambda out: out.write(NEW))
    assert file.read_bytes() == NEW
    assert [f.name for f in file.parent.iterdir()] == ["last.pt"]


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


# -- extra state ------------------------------------------------------------------------------------------------------


def test_extra_state_belongs_to_one_checkpoint(file: Path) -> None:
    assert checkpoint.load_sidecar(file) is None
    extra = checkpoint.save_sidecar(file, OLD, {"n": 1, "weights": torch.ones(2)})
    assert extra.parent == file.parent
    assert extra.suffix == ".accel"
    found = checkpoint.load_sidecar(file)
    assert found is not None
    assert found["n"] == 1
    file.write_bytes(NEW)
    assert checkpoint.load_sidecar(file) is None
    extra.rename(checkpoint.sidecar_path(file, sidecar.digest(file)))  # another's, under this one's name
    assert checkpoint.load_sidecar(file) is None


def test_numbers_of_numpy_are_saved_as_python_s(file: Path) -> None:
    """Schedulers and hosts set rates by `numpy.interp`, and a file of plain values cannot be read with them."""
    group = {
        "lr": numpy.float64(0.1),
        "count": numpy.int64(3),
        "on": numpy.bool_(True),
        "betas": (numpy.float32(0.5), 1),
    }
    checkpoint.save_sidecar(file, OLD, {"optimizer": {"param_groups": [group]}})
    found = checkpoint.load_sidecar(file)
    assert found is not None
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "count": 3, "on": True, "betas": (0.5, 1)}]


def test_a_failed_write_of_extra_state_leaves_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save_sidecar(file, OLD, {"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError):
            checkpoint.save_sidecar(file, NEW, {"n": 2})
    found = checkpoint.load_sidecar(file)
    assert found is not None
    assert found["n"] == 1


def test_drop_removes_older_states_of_this_checkpoint_only(tmp_path: Path) -> None:
    last, other, odd = tmp_path / "last.pt", tmp_path / "last.old.pt", tmp_path / "la[s]t.pt"
    first = checkpoint.save_sidecar(last, OLD, {})
    second = checkpoint.save_sidecar(last, NEW, {})
    theirs = checkpoint.save_sidecar(other, OLD, {})
    strange = checkpoint.save_sidecar(odd, OLD, {})
    checkpoint.drop_sidecars(last, keep=second)
    assert (first.exists(), second.exists(), theirs.exists(), strange.exists()) == (False, True, True, True)
    checkpoint.drop_sidecars(last)
    checkpoint.drop_sidecars(odd)
    assert (second.exists(), theirs.exists(), strange.exists()) == (False, True, False)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_without_wrappers() -> None:
    for key in ("_orig_mod.a.weight", "module.a.weight", "module._orig_mod.a.weight", "a._orig_mod.weight"):
        assert checkpoint.clean_key(key) == "a.weight"
    assert checkpoint.clean_key("a.module.weight") == "a.module.weight"


def test_unwrap() -> None:
    model = mlp()
    assert checkpoint.unwrap(torch.compile(model, backend="eager")) is model
    assert checkpoint.unwrap(model) is model
    holder = nn.Module()
    holder.module = model
    assert checkpoint.unwrap(holder) is holder


# -- random state -----------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.randn(),
        torch.rand(3),
        torch.randperm(5),
    ]


def test_random_state_of_python_numpy_and_torch_comes_back() -> None:
    checkpoint.seed_everything(3)
    random.gauss(0, 1)  # both keep the second of a pair of normal numbers
    numpy.random.randn()
    buffer = io.BytesIO()
    torch.save(checkpoint.random_state(), buffer)
    right = draws()
    checkpoint.seed_everything(4)
    assert not same(draws(), right)
    buffer.seek(0)
    checkpoint.set_random_state(torch.load(buffer, weights_only=True))
    assert same(draws(), right)


def test_the_same_seed_is_the_same_run() -> None:
    checkpoint.seed_everything(5)
    right = draws()
    checkpoint.seed_everything(5)
    assert same(draws(), right)
    checkpoint.seed_everything(2**40)  # numpy takes 32 bits


def test_a_state_without_numpy_loads() -> None:
    state = checkpoint.random_state()
    del state["numpy"]
    checkpoint.set_random_state(state)


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_extra_state_names_its_file(tmp_path: Path, content: bytes | None) -> None:
    last = tmp_path / "last.pt"
    last.write_bytes(b"weights")
    extra = checkpoint.save_sidecar(last, b"weights", {"x": torch.zeros(1000)})
    extra.write_bytes(extra.read_bytes()[:500] if content is None else content)
    with pytest.raises(checkpoint.DamagedState, match=re.escape(str(extra))):
        checkpoint.load_sidecar(last)
