"""`accel doctor`: what this installation does without, packages in the way, the start-up file."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins import doctor
from plugins.core.system import versions
from plugins.doctor import Lack, lacking, others, start_up_file, words

ROOT = Path(__file__).parents[1]


def package(folder: Path, name: str = "plugins") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    return folder / name


def test_what_torch_lacks_is_a_row_with_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HOSTS", {})
    rows = [dataclasses.replace(versions.ISOLATION, here=False), versions.Symbol("x", "1", "y", True)]
    monkeypatch.setattr(versions, "TABLE", rows)
    wanted = Lack("torch", rows[0].name, rows[0].since, rows[0].without)
    assert list(lacking()) == [wanted]


def test_a_host_that_is_not_installed_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "TABLE", ())
    monkeypatch.setattr(doctor, "HOSTS", {"ultralytics": "no_such_host"})
    assert list(lacking()) == []


def test_another_package_of_our_name_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = package(tmp_path / "here"), package(tmp_path / "there", "integrations")
    monkeypatch.chdir(here.parent)
    monkeypatch.syspath_prepend(there.parent)
    assert [path for path in others() if path.is_relative_to(tmp_path)] == [here, there]
    assert any(str(here) in line and "rename" in line for line in words())


def test_a_copy_of_this_project_is_no_other_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path)
    (tmp_path / "accel_plugins_start.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "plugins" not in others()


def test_the_start_up_file_is_named_with_the_way_to_remove_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *[p for p in sys.path if "site-packages" not in p]])
    assert start_up_file() is None
    assert any("none" in line for line in words())
    (site / "accel_plugins.pth").write_text("")
    assert start_up_file() == site / "accel_plugins.pth"
    assert any(str(site) in line and "delete" in line for line in words())


def test_accel_behind_another_package_of_our_name_is_one_line(tmp_path: Path) -> None:
    package(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import accel_plugins_start as a; a.accel()", "doctor"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("accel: another package named plugins is in the way")
    assert done.stderr.count("\n") == 1
