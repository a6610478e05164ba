"""Random command lines of `accel` and `yolo`: each ends as it should, or with one line that says what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from integrations.ultralytics import command
from plugins import cli, easyocr
from tests.easyocr.conftest import TINY, numbers, write_folder
from tests.trust.strategies import NAMES, WORDS, allowed, damaged, sizes, tried

NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORD = st.sampled_from([word for word in WORDS if "\0" not in word and word.isprintable()]) | NO_SURROGATES
FILES = ["run", "run/accel_report.json", "damaged.json", "deep.json", "plan.json", "net.yaml", "damaged.pt", "data",
         "cache", "cache.tar.gz", "no.such", ".", "/", "/dev/null", "x" * 300, "train/0.png",
         "a/../net.yaml"]  # fmt: skip
FIELD = st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), allowed(name).map(str) | WORD))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands are given: a report, a data set, a yaml, a cache, and damaged files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accel"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    from plugins.core.telemetry.report import Report

    Report("loop", {}).write(tmp_path / "run")
    write_folder(tmp_path / "train", numbers(4))
    (tmp_path / "cache" / "plans").mkdir(parents=True)
    (tmp_path / "net.yaml").write_text(
        json.dumps({"number": "0123456789", "train_data": "train", "valid_data": "train", "num_iter": 2, **TINY})
    )
    (tmp_path / "damaged.json").write_bytes((tmp_path / "run" / "accel_report.json").read_bytes()[:200])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "damaged.pt").write_bytes(b"PK\3\4 and no more")
    (tmp_path / "cache.tar.gz").write_bytes(b"\x1f\x8b no more")
    return tmp_path


def ended(run: Any, argv: list[str]) -> tuple[int, str]:
    """Exit code of a command, and what it told."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.setattr(sys, "argv", argv)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                run()
            except SystemExit as stop:
                return int(stop.code or 0), told.getvalue()
    return 0, told.getvalue()


def fine(code: int, told: str) -> None:
    assert "Traceback" not in told
    assert code in (0, 1, 2, 130)  # 2: the command's own usage, by click
    if code == 1:
        assert told.strip().count("\n") == 0
        assert told.startswith(("accel: ", "accel-plugins: "))


def accel_lines() -> SearchStrategy[list[str]]:
    path = st.sampled_from(FILES) | WORD
    option = st.sampled_from(["--folder", "--output", "--older-than", "--resume", "--trust", "--force", "--help", "-x"])
    pair = FIELD.map("=".join) | st.tuples(WORD, WORD).map("=".join) | WORD
    one = st.tuples(st.sampled_from(["report", "repair"]), path).map(list)
    cache = st.tuples(st.just("cache"), st.sampled_from(["list", "prune", "export", "import", "x"])).map(list)
    more = st.lists(path | option, max_size=2)
    fit = st.tuples(st.just("fit"), path | st.just("net.yaml")).map(list)
    return (
        st.tuples(one | cache, more).map(lambda two: [*two[0], *two[1]])
        | st.tuples(fit, st.lists(pair, max_size=3), st.lists(option, max_size=1)).map(lambda t: [*t[0], *t[1], *t[2]])
        | st.lists(path | option, max_size=3)
    ).filter(lambda line: not {"doctor", "bench", "--trust"} & set(line))


@sizes(60, 1200)
def test_accel(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training itself is left out: it begins where everything has been checked."""
    begun: list[Any] = []

    class Training:
        def __init__(self, *args: Any) -> None:
            begun.append(args)

        def train(self, *args: Any) -> Any:
            raise easyocr.AccelError("begun")

    monkeypatch.setattr(easyocr.training, "Run", Training)
    tried(count, accel_lines(), lambda line: fine(*ended(cli.main, ["accel", *line])))
    assert begun or count < 1000


@sizes(150, 2000)
def test_yolo(count: int, folder: Path) -> None:
    modules = st.sampled_from(
        ["plugins.yolo", "plugins.yolo", "no.such", "plugins", "", "a b", "plugins.yolo,json", "1"]
    )
    ours = st.tuples(st.just("callbacks"), modules) | FIELD.map(lambda pair: (f"accel.{pair[0]}", pair[1]))
    unknown = st.tuples(WORD.map(lambda word: f"accel.{word}"), WORD)
    theirs = st.sampled_from(
        [("model", "yolov8n.yaml"), ("batch", "8"), ("imgsz", "64"), ("compile", "True"), ("x", "[")]
    )
    spelt = st.sampled_from(["{}={}", "{} = {}", "{}= {}", "--{}={},", "{}={}"])
    part = st.builds(lambda pair, how: how.format(*pair).split(" "), ours | ours | theirs | unknown, spelt)
    line = st.lists(part | WORD.map(lambda word: [word]) | st.just(["train"]), max_size=6)
    got: list[list[str]] = []

    def check(parts: list[list[str]]) -> None:
        def host() -> None:
            got.append(sys.argv)

        argv = ["yolo", *(word for part in parts for word in part if "python" not in word)]
        fine(*ended(lambda: command.run(host), argv))

    tried(count, line, check)
    assert got


@sizes(60, 500)
def test_reports_and_plan_files_that_are_damaged(count: int, folder: Path) -> None:
    report = (folder / "run" / "accel_report.json").read_bytes()
    plan = json.dumps({"schema": 1, "start": {"precision": "bf16"}, "switches": [{"update": 3, "plan": {}}]}).encode()

    def check(data: bytes) -> None:
        (folder / "some.json").write_bytes(data)
        fine(*ended(cli.main, ["accel", "report", "some.json"]))
        line = ["yolo", "train", "callbacks=plugins.yolo", "accel.plan=some.json"]
        fine(*ended(lambda: command.run(lambda: None), line))

    tried(count, damaged(st.sampled_from([report, plan])), check)
