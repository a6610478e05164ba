"""Disks that are full, read-only or gone while a run saves, a clock that jumps, and two runs in one folder."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plugins import AccelError
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.checkpoint.run_lock import FolderInUse, run_lock
from plugins.loop import Accelerated
from tests.easyocr.conftest import TINY, numbers, write_folder
from tests.trust.strategies import sizes

PLAIN: dict[str, Any] = {"plan": "off", "compile": "off", "precision": "fp32"}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


@contextmanager
def failing(below: Path, at: int, number: int) -> Iterator[list[int]]:
    """Operation `at` on files below a folder, and all later ones, fail: the disk is full, read-only or gone."""
    seen, plain = [0], {name: getattr(os, name) for name in ("open", "replace", "fsync", "chmod")}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            if name == "fsync" or str(first).startswith(str(below)):
                seen[0] += 1
                if seen[0] >= at:
                    raise OSError(number, os.strerror(number), str(first))
            return plain[name](first, *rest, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in plain:
            patch.setattr(os, name, wrapped(name))
        yield seen


def accelerated() -> Accelerated:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made = Accelerated(model, torch.optim.AdamW(model.parameters()), ema=0.9, say=lambda line: None, **PLAIN)
    made.training_step(lambda x: model(x).square().mean(), torch.randn(2, 3))
    return made


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@sizes(6, 12)
def test_a_save_that_fails_leaves_the_old_file_and_names_it(count: int, number: int, tmp_path: Path) -> None:
    accel, path = accelerated(), tmp_path / "run" / "last.pt"
    accel.save(path, position=1)
    whole, failed = path.read_bytes(), 0
    for at in range(1, count):
        with failing(path.parent, at, number):
            try:
                accel.save(path, position=2)
            except OSError as error:
                failed += 1
                assert error.errno == number
                assert error.filename == str(path)
                assert path.read_bytes() == whole
        assert accelerated().resume(path)["position"] in (1, 2)
        assert list(path.parent.glob(".*.tmp")) == []
        path.write_bytes(whole)
    assert failed
    accel.end()


def test_a_folder_that_vanishes_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    accel = accelerated()
    accel.save(tmp_path / "run" / "last.pt")
    shutil.rmtree(tmp_path / "run")
    accel.save(tmp_path / "run" / "last.pt")  # made anew
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file in its place")
    with pytest.raises(OSError, match="run"):
        accel.save(tmp_path / "run" / "last.pt")
    accel.training_step(lambda x: accel.model(x).square().mean(), torch.randn(2, 3))
    assert accel.updates == 2
    accel.end()


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    write_folder(folder / "train", numbers(8))
    write_folder(folder / "valid", numbers(2, seed=1), seed=100)
    return {
        "number": "0123456789", "experiment_name": "lines_run", "train_data": str(folder / "train"),
        "valid_data": str(folder / "valid"), "output": str(folder / "runs"), "imgH": 32, "batch_size": 4, "num_iter": 4,
        "valInterval": 1, "optim": "adam", "progress": False, "tensorboard": False, **TINY, **more,
    }  # fmt: skip


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@sizes(3, 25)
def test_a_recognizer_s_run_on_a_full_disk_is_one_line_and_can_be_resumed(
    count: int, number: int, tmp_path: Path
) -> None:
    from plugins.easyocr import fit

    told: list[str] = []
    last = tmp_path / "runs" / "lines_run" / "last.pt"
    for step in range(count):
        given = settings(tmp_path)
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        with failing(tmp_path / "runs", 8 + step * (5 if count < 10 else 4), number):
            try:
                fit(given, say=lambda line: None, **PLAIN)
            except AccelError as error:
                assert "\n" not in str(error)
                told.append(str(error))
        if last.is_file():
            assert fit(given, resume=True, say=lambda line: None, **PLAIN).updates == 4
    assert any(os.strerror(number) in line for line in told)


def test_a_folder_that_vanishes_under_a_recognizer_s_run(tmp_path: Path) -> None:
    from plugins.easyocr import fit

    given, run = settings(tmp_path), tmp_path / "runs" / "lines_run"

    def say(line: str) -> None:
        shutil.rmtree(run, ignore_errors=True)

    from plugins.easyocr import training

    with pytest.MonkeyPatch.context() as patch:
        save = training.Run._save
        patch.setattr(training.Run, "_save", lambda self: (shutil.rmtree(run, ignore_errors=True), save(self)))
        try:
            fit(given, say=say, **PLAIN)
        except AccelError as error:
            assert "\n" not in str(error)
            assert "lines_run" in str(error)


@pytest.mark.parametrize("jump", [-(10**9), -3600.0, 3600.0, 10**9])
def test_a_clock_that_jumps_changes_no_weight(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        accel = Accelerated(model, torch.optim.SGD(model.parameters(), lr=0.1), say=lambda line: None, **PLAIN)
        for _ in range(8):
            accel.training_step(lambda x: model(x).square().mean(), torch.randn(2, 3))
        accel.save(tmp_path / "last.pt")
        accel.resume(tmp_path / "last.pt")
        accel.end(tmp_path)
        return {name: value.clone() for name, value in model.state_dict().items()}

    right = trained()
    now, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now() + (jump if next(calls) % 2 else 0.0))
    found = trained()
    assert all(torch.equal(right[name], found[name]) for name in right)
    cache = PlanCache(tmp_path / "cache")
    cache.make()
    cache.keep("ab" * 32, {"plan": {}})
    assert [entry.age_days is not None for entry in cache.entries()] == [True]


def test_two_runs_at_once_in_one_folder(tmp_path: Path) -> None:
    from plugins.easyocr import fit

    given = settings(tmp_path)
    folder = tmp_path / "runs" / "lines_run"
    with run_lock(folder):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fit(given, say=lambda line: None, **PLAIN)
            except AccelError as error:
                code = 0 if "another run writes here" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with pytest.raises(FolderInUse), run_lock(folder):
            pass
    with run_lock(folder):
        pass
