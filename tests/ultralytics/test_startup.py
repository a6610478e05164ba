"""The start-up file as a user gets it: a wheel, installed into an environment with the stock `yolo` command.

The environment holds only our wheel; the packages of the running interpreter are linked into it by a path file,
which Python reads after ours, as it may happen to a user.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import timeit
import venv
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
LINE = (ROOT / "accel_plugins.pth").read_text(encoding="utf-8")
MINE = """
def started(trainer): print('started', trainer.args.imgsz, trainer.args.epochs)
def saved(trainer): print('saved', trainer.last.name)
callbacks = {'on_train_start': started, 'on_model_save': [saved]}
"""
PLUG = """
def configure(options, host_args):
    print('configured', __name__, options, host_args)
    return {}
if __name__ == '__main__':
    import sys
    from integrations.ultralytics import command
    sys.exit(command.main(sys.argv, ['plug']))
"""


class Environment:
    """A small virtual environment, and the stock console script in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=os.name != "nt")
        scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # Python 3.10 has no such name
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)}, scheme=scheme)
        self.site = Path(paths["purelib"])
        self.python = Path(paths["scripts"], "python")
        self.script = Path(paths["scripts"], "yolo")
        self.script.write_text(
            "import sys\nfrom ultralytics.cfg import entrypoint\n"
            "if __name__ == '__main__':\n    sys.exit(entrypoint())\n"
        )

    def pip(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def link(self) -> None:
        """Make this interpreter's packages importable, after the environment's own."""
        outer = sysconfig.get_paths()
        (self.site / "zz_linked.pth").write_text(f"{outer['purelib']}\n{outer['platlib']}\n")

    def run(self, folder: Path, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "YOLO_OFFLINE": "true",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [self.python, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    def yolo(self, folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
        return self.run(folder, str(self.script), *arguments, path=path)


def build(folder: Path, version: str) -> Path:
    """The project's wheel: `version` is standard or editable."""
    from hatchling.builders.wheel import WheelBuilder

    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=[version])))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "standard")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("venv"))
    environment.pip("install", "--no-deps", "--no-index", wheel)
    environment.link()
    return environment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a module of callbacks and one that reads settings."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "plug.py").write_text(PLUG)
    return tmp_path


def arms(argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the line calls `arm()`."""
    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "accel_plugins_start", SimpleNamespace(arm=lambda: calls.append(1)))
        patch.setattr(sys, "argv", argv)
        exec(LINE, {}, {})  # separate names, as Python's site module has it
    return len(calls)


@pytest.mark.parametrize(
    "program", ["yolo", "/usr/bin/yolo", "ultralytics", r"C:\env\Scripts\yolo.EXE", r"C:\e\ultralytics-script.py"]
)
@pytest.mark.parametrize("argument", ["callbacks=a", "callbacks", "--callbacks=a,", " callbacks = a", "accel.ema=off"])
def test_the_line_acts_on_our_arguments(program: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arms([program, "train", argument, "x=1"], monkeypatch) == 1


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [""],
        ["-c"],
        ["yolo"],
        ["yolo", "train", "model=callbacks.pt", "accelerate=1"],
        ["python", "callbacks=a"],
        ["/yolo/train.py", "callbacks=a"],
        ["myyolo", "callbacks=a"],
    ],
)
def test_the_line_does_nothing_otherwise(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert arms(argv, monkeypatch) == 0


def test_the_line_is_one_import_line_that_names_no_host_and_cannot_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LINE.startswith("import sys")
    assert LINE.endswith("\n")
    assert LINE.count("\n") == 1
    monkeypatch.setitem(sys.modules, "accel_plugins_start", None)  # half removed: the import fails
    monkeypatch.setattr(sys, "argv", ["yolo", "callbacks=a"])
    exec(LINE, {}, {})
    monkeypatch.delattr(sys, "argv")  # an embedded interpreter
    exec(LINE, {}, {})


def test_the_line_costs_less_than_a_millisecond_when_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["yolo", "train", *(f"argument{i}=value" for i in range(50))])
    best = min(timeit.repeat(lambda: exec(LINE, {}, {}), number=10, repeat=50)) / 10
    assert best < 1e-3


def test_without_our_arguments_nothing_of_ours_is_loaded(installed: Environment, folder: Path) -> None:
    code = "import sys; print([m for m in sys.modules if m.startswith(('accel', 'plugins', 'integr'))], sys.meta_path)"
    (folder / "yolo").write_text(code)
    plain = installed.run(folder, "yolo", "train", "imgsz=32")
    assert plain.stdout.startswith("[] ")
    assert "_Wait" not in plain.stdout
    assert plain.stderr == ""
    assert "_Wait" in installed.run(folder, "yolo", "train", "callbacks=mine").stdout


def test_stock_command_trains_with_a_users_callbacks(installed: Environment, folder: Path) -> None:
    from PIL import Image

    for i in range(2):
        for kind in ("images", "labels"):
            (folder / kind).mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), (90 * i, 60, 30)).save(folder / f"images/{i}.png")
        (folder / f"labels/{i}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n")
    arguments = "train model=yolov8n.yaml data=data.yaml imgsz=32 epochs=1 batch=2 device=cpu plots=False"
    ours = ["--callbacks", "=", "[mine,", "plug],", "accel.ema =off", "accel.clip_norm=0.1,"]
    done = installed.yolo(folder, *arguments.split(), *ours, f"project={folder / 'runs'}", "name=r")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "started 32 1" in lines
    assert "saved last.pt" in lines
    assert any(line.startswith("configured plug {'ema': 'off', 'clip_norm': '0.1'} {'mode': 'train'") for line in lines)
    assert (folder / "runs/r/weights/last.pt").is_file()


def test_a_typo_gets_the_host_s_own_refusal(installed: Environment, folder: Path) -> None:
    plain = installed.yolo(folder, "train", "nonsense=1")
    ours = installed.yolo(folder, "train", "callbacks=mine", "nonsense=1")
    refusal = plain.stderr.strip().splitlines()[-1]
    assert refusal.startswith("SyntaxError: 'nonsense' is not a valid YOLO argument.")
    assert ours.stderr.strip().splitlines()[-1] == refusal
    assert ours.returncode == plain.returncode == 1
    # The host's help names the arguments as typed, ours among them.
    assert ours.stdout.replace("'callbacks=mine', ", "") == plain.stdout


def test_a_missing_module_is_one_line_and_nothing_is_written(installed: Environment, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = installed.yolo(folder, "train", "callbacks=no.such.module", "model=yolov8n.yaml")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "callbacks=no.such.module: no module 'no' " in done.stderr
    assert sorted(folder.rglob("*")) == before


def test_another_package_of_our_name_is_named(installed: Environment, folder: Path) -> None:
    (folder / "other/plugins").mkdir(parents=True)
    other = folder / "other/plugins/__init__.py"
    other.touch()
    done = installed.yolo(folder, "version", "callbacks=plugins.yolo", path=str(other.parents[1]))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"found {other}, expected {installed.site / 'plugins' / '__init__.py'}" in done.stderr


def test_module_form_plugs_the_importable_module_in_once(installed: Environment, folder: Path) -> None:
    done = installed.run(folder, "-m", "plug", "version", "callbacks=plug", "accel.ema=off")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "configured plug {'ema': 'off'} {}"
    assert done.stdout.count("configured") == 1


def test_editable_install_acts_too(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environment = Environment(tmp_path_factory.mktemp("venv"))
    environment.pip("install", "--no-deps", "--no-index", build(tmp_path_factory.mktemp("wheel"), "editable"))
    environment.link()
    done = environment.yolo(folder, "version", "callbacks=plug", "accel.ema=off")
    assert done.stdout.splitlines()[0] == "configured plug {'ema': 'off'} {}", done.stderr
    code = "import accel_plugins_start as s; print(s.shadowed(['plugins.yolo']), s.__file__)"
    assert environment.run(folder, "-c", code).stdout.split() == [
        "None",
        str(environment.site / "accel_plugins_start.py"),
    ]


def test_uninstalling_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    (environment.site / "other.py").touch()  # pip takes folders away that it leaves empty
    before = sorted(tmp_path.rglob("*"))
    environment.pip("install", "--no-deps", "--no-index", "--no-compile", wheel)
    assert (environment.site / "accel_plugins.pth").is_file()
    environment.pip("uninstall", "--yes", "accel-plugins")
    assert sorted(tmp_path.rglob("*")) == before
