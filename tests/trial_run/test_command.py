"""What is made of a command that the user typed, and what is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plugins.errors import AccelError
from plugins.trial_run.command import prepared

WITH, WITHOUT = "from plugins.loop import Accelerated\n", "import torch\n"


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with.py").write_text(WITH)
    (tmp_path / "without.py").write_text(WITHOUT)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__init__.py").write_text("")
    (tmp_path / "part" / "deep.py").write_text("def late():\n    from plugins import hf, AccelCallback\n")
    (tmp_path / "through.py").write_text("from part.deep import late\n")
    (tmp_path / "trainer.py").write_text("from transformers import Trainer\n")
    (tmp_path / "detector.py").write_text("from ultralytics import YOLO\n")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("yolo train data=x.yaml", "-m plugins.yolo train data=x.yaml"),
        ("/some/where/yolo detect train callbacks=a", "-m plugins.yolo detect train callbacks=a"),
        ("accel fit lines.yaml lr=1", "-m plugins.cli fit lines.yaml lr=1"),
        ("python with.py --epochs 3", "with.py --epochs 3"),
        ("python3 -u -W ignore with.py", "-u -W ignore with.py"),
        ("python -m plugins.yolo train", "-m plugins.yolo train"),
        ("python -m part.deep", "-m part.deep"),
        ("./with.py", "./with.py"),
        ("python through.py", "through.py"),
        ("python -c pass", "-c pass"),
    ],
)
def test_a_command_runs_in_this_interpreter_with_the_plug(command: str, expected: str) -> None:
    assert prepared(command.split()) == [sys.executable, *expected.split()]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "none was given"),
        ("yolo predict source=x", "yolo predict: no training"),
        ("yolo mode=val", "yolo mode=val: no training"),
        ("yolo model=x.pt", "no training; allowed is yolo train"),
        ("yolo train resume", "resume: a trial begins anew"),
        ("yolo train resume=last.pt", "a trial begins anew"),
        ("accel doctor", "accel doctor: no training"),
        ("accel fit a.yaml --resume", "--resume: a trial begins anew"),
        ("python absent.py", "absent.py: no such file"),
        ("no-such-program x", "no-such-program: no such program"),
        ("python without.py", "without.py: does not use the plug, which a trial needs; add from plugins.loop import"),
        ("python trainer.py", "callbacks=[AccelCallback]"),
        ("python detector.py", "attach(model) before model.train"),
    ],
)
def test_what_is_no_training_is_refused_in_one_line(command: str, words: str) -> None:
    with pytest.raises(AccelError) as refused:
        prepared(command.split())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_resume_off_is_no_resume() -> None:
    assert prepared(["yolo", "train", "resume=False"])[1:] == ["-m", "plugins.yolo", "train", "resume=False"]
