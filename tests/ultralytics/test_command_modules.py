"""The modules that are listed in `callbacks=`: read, given the settings, and run in worker processes too."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from ultralytics import YOLO
from ultralytics.utils.callbacks.base import default_callbacks, get_default_callbacks
from ultralytics.utils.dist import ddp_cleanup, generate_ddp_file

from integrations.contract import UnsupportedRun
from integrations.ultralytics import command
from integrations.ultralytics.command import Command, CommandError
from plugins.errors import AccelError

pytestmark = pytest.mark.usefixtures("folder")
BAD = {
    "no.such.module": ("", "no module 'no'"),
    "os.nothing": ("", "no module 'os.nothing'"),
    "mine.py": ("callbacks = {}", "not the name of a module"),
    "./mine": ("callbacks = {}", "not the name of a module"),
    "without": ("x = 1", "without.py has no `callbacks`"),
    "listed": ("callbacks = [print]", "is of type list; expected a dict of event -> function"),
    "event": ("callbacks = {'on_train_begin': print}", "unknown event 'on_train_begin'; allowed are on_pretrain"),
    "value": ("callbacks = {'on_train_start': 3}", "on_train_start holds 3; expected"),
    "raises": ("x = 1\n1 / 0", "ZeroDivisionError: division by zero ({folder}/raises.py:2)"),
    "typo": ("x = 1\ndef f(:\n", "({folder}/typo.py:2)"),
    "leaves": ("import sys\nsys.exit(3)", "SystemExit: 3 ({folder}/leaves.py:2)"),
    "needs": ("import no_such_package", "No module named 'no_such_package' ({folder}/needs.py:1)"),
    "deep": ("import json\njson.loads('')", "({folder}/deep.py:2)"),
    "refuses": ("def configure(o, h): raise ValueError('accumulate=0:\\n not allowed')", "accumulate=0: not allowed"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_module_is_one_line_before_the_host_runs(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, expected = BAD[name]
    (folder / f"{name.removesuffix('.py').strip('./')}.py").write_text(source)
    before = sorted(folder.rglob("*"))
    sys.argv = ["yolo", "train", f"callbacks={name}"]
    with pytest.raises(SystemExit) as stop:
        command.run(lambda: pytest.fail("the host ran"))
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (1, "", 1)
    assert expected.format(folder=folder) in err
    assert name == "refuses" or name in err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["accel.accumulate=4"], "accel.accumulate=4: add callbacks=plugins.yolo"),
        (["accel.accumulate=4", "callbacks=mine"], "callbacks=mine reads no settings; add plugins.yolo"),
        (["callbacks=mine", "accel.ema="], "accel.ema=: the value is missing"),
        (["callbacks="], "callbacks=: the value is missing"),
        (["callbacks=[]"], "callbacks=[]: the value is missing"),
    ],
)
def test_a_setting_without_reader_or_value(line: list[str], expected: str, folder: Path) -> None:
    (folder / "mine.py").write_text("callbacks = {}")
    with pytest.raises(CommandError, match=r"^[^\n]+$") as error:
        command.load(command.split(["train", *line]))
    assert expected in str(error.value)


def test_configure_is_given_both_parts_and_used_instead(folder: Path) -> None:
    (folder / "plug.py").write_text(
        "callbacks = {'on_train_end': print}\n"
        "def configure(options, host_args):\n"
        "    return {'on_train_start': [lambda trainer: (options, host_args)]}\n"
    )
    (folder / "mine.py").write_text("callbacks = {'on_train_start': len}")
    found = command.load(Command([], ["mine", "plug"], {"ema": "off"}, {"batch": 4}))
    first, second = found.pop("on_train_start")
    assert first is len
    assert second(None) == ({"ema": "off"}, {"batch": 4})
    assert not found


def test_the_current_directory_comes_last(folder: Path) -> None:
    (folder / "json.py").write_text("callbacks = {}")
    with pytest.raises(CommandError, match=r"json/__init__\.py has no `callbacks`"):
        command.load(Command([], ["json"]))
    assert sys.path[-1] == str(folder)


def test_arguments_are_edited_in_place_and_models_get_the_functions(folder: Path) -> None:
    (folder / "mine.py").write_text("def start(trainer): ...\ncallbacks = {'on_train_start': start}")
    argv = sys.argv
    argv[:] = ["yolo", "train", "callbacks", "=", "mine", "imgsz=32"]

    def host() -> YOLO:
        assert sys.argv is argv
        assert argv == ["yolo", "train", "imgsz=32"]
        return YOLO(YOLO("yolov8n.yaml"))

    model = command.run(host)
    assert isinstance(model, YOLO)
    start = sys.modules["mine"].start  # type: ignore[attr-defined]
    assert model.callbacks["on_train_start"] == [*default_callbacks["on_train_start"], start]
    assert model.callbacks != get_default_callbacks()  # else `train` over several data sets loses them
    assert "with_callbacks" not in YOLO.__init__.__qualname__
    assert YOLO("yolov8n.yaml").callbacks == get_default_callbacks()


def test_an_accel_error_of_the_run_is_one_line_and_others_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def host(error: Exception) -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        command.run(lambda: host(AccelError("compile=on: refused")))
    assert stop.value.code == 1
    assert capsys.readouterr().err == "accel-plugins: compile=on: refused\n"
    with pytest.raises(ValueError, match="the host's"):
        command.run(lambda: host(ValueError("the host's")))


def test_what_the_plug_refuses_in_the_middle_of_a_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def host() -> None:
        raise UnsupportedRun("trainer.model: a callback put another model there")

    with pytest.raises(SystemExit):
        command.run(host)
    assert capsys.readouterr().err == "accel-plugins: trainer.model: a callback put another model there\n"


def test_main_plugs_its_module_in_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plug.py").write_text("def configure(options, host_args):\n    print(options)\n    return {}")
    seen = []
    monkeypatch.setattr(command.host_cfg, "entrypoint", lambda: seen.append(sys.argv[:]))
    command.main(["plug.py", "train", "accel.ema=off", "callbacks=plug"], ["plug"])
    assert seen == [["yolo", "train"]]


def test_worker_processes_run_the_functions_with_their_settings(folder: Path) -> None:
    """The host's own worker file, run as a worker would: elsewhere, with nothing but what the file says."""
    (folder / "plug.py").write_text(
        "class Trainer:\n"
        "    def __init__(self, cfg=None, overrides=None, _callbacks=None): self.callbacks = _callbacks\n"
        "    def train(self): [f(self) for f in self.callbacks['on_train_start']]\n"
        "def plain(trainer): print('plain', __name__)\n"
        "class Plug:\n"
        "    def __init__(self, options): self.options = options\n"
        "    def start(self, trainer): print('plug', self.options)\n"
        "def configure(options, host_args):\n"
        "    return {'on_train_start': [plain, Plug(options).start]}\n"
    )
    callbacks = command.load(Command([], ["plug"], {"ema": "off"}))
    trainer = sys.modules["plug"].Trainer(_callbacks=callbacks)  # type: ignore[attr-defined]
    trainer.args, trainer.model = Namespace(), None
    file = generate_ddp_file(trainer)
    try:
        environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
        worker = subprocess.run(
            [sys.executable, file], cwd="/", env=environment, capture_output=True, text=True, check=False
        )
    finally:
        ddp_cleanup(trainer, file)
    assert worker.stdout.splitlines() == ["plain plug", "plug {'ema': 'off'}"], worker.stderr
