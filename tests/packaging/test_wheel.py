"""The wheel: what it holds and says, a clean install of it, and that pip leaves an older torch as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import plugins

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling")


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env={**env, **more}, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_packages_their_types_the_start_up_file_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        "plugins/py.typed",
        "integrations/py.typed",
        "plugins/core/session.py",
        "plugins/core/telemetry/page.html",
        "plugins/core/telemetry/page.css",
        "integrations/huggingface/versions.py",
        "accel_plugins.pth",
        "accel_plugins_start.py",
    }
    assert wanted <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"plugins", "integrations", "accel_plugins.pth", "accel_plugins_start.py"}


def test_the_metadata_names_version_licence_and_pythons(metadata: Message) -> None:
    assert metadata["Version"] == plugins.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_no_requirement_has_an_upper_bound(metadata: Message) -> None:
    for requirement in metadata.get_all("Requires-Dist", []):
        bounds = requirement.partition(";")[0]
        assert not any(sign in bounds for sign in ("<", "==", "~=")), requirement
    assert "torch>=2.6" in metadata.get_all("Requires-Dist", [])


def test_a_clean_install_imports_from_its_own_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    done = python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    assert done.returncode == 0, done.stderr
    code = "import plugins, plugins.yolo, plugins.config; print(plugins.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(target)


def test_pip_leaves_an_older_torch_as_it_is(wheel: Path, tmp_path: Path) -> None:
    """pip resolves against an environment of stand-ins: torch 2.6.0, Ultralytics 8.3.100 and all that ours needs."""
    index = tmp_path / "index"
    index.mkdir()
    names = {"torch": "2.6.0", "ultralytics": "8.3.100", "pydantic": "2.11", "pydantic-settings": "2.8"}
    names |= {"jinja2": "3.1", "psutil": "5.9", "cloudpickle": "3.1.1", "typer": "0.15", "rich": "13"}
    environment = tmp_path / "environment"
    done = python("-m", "venv", "--without-pip", str(environment))
    assert done.returncode == 0, done.stderr
    site = min(environment.glob("[lL]ib/**/site-packages"))
    for name, version in names.items():
        stand_in(site, name, version)
        if name == "torch":
            offer(index, name, "2.14.0")  # what pip would take if it were let
    report = tmp_path / "report.json"
    binary = next(p for p in (environment / "bin" / "python", environment / "Scripts" / "python.exe") if p.exists())
    done = python(
        "-m", "pip", "--python", str(binary), "install", "--dry-run", "--no-index", "--find-links", str(index),
        "--report", str(report), "--quiet", f"{wheel}[yolo]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moved = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert moved == {"accel-plugins"}


def stand_in(site: Path, name: str, version: str) -> None:
    """An installed distribution of this name, without a file of its own."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: yaml\n"
    (folder / "METADATA").write_text(text)
    (folder / "RECORD").write_text("")
    (folder / "INSTALLER").write_text("pip\n")


def offer(index: Path, name: str, version: str) -> None:
    """A wheel that pip could take."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
