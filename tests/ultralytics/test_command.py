"""The grammar of `callbacks=` and `accel.FIELD=` in the host's command."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ultralytics.cfg import merge_equals_args

from integrations.ultralytics import command
from integrations.ultralytics.command import CommandError

pytestmark = pytest.mark.usefixtures("folder")
HOST = ["train", "model=yolov8n.yaml", "imgsz", "=", "[32,", "64]", "--lr0=0.1,", "name= a", "plots =False"]


@pytest.mark.parametrize(
    "ours",
    [
        ["callbacks=plugins.yolo"],
        ["callbacks", "=", "plugins.yolo"],
        ["callbacks=", "plugins.yolo"],
        ["callbacks", "=plugins.yolo"],
        ["callbacks = plugins.yolo"],
        ["--callbacks=plugins.yolo"],
        ["--callbacks", "=", "plugins.yolo,"],
        ["callbacks=plugins.yolo,"],
        ["callbacks=[plugins.yolo]"],
        ["callbacks=[plugins.yolo,", "'plugins.yolo']"],
        ["callbacks='plugins.yolo'"],
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2, 6, 9])
def test_every_spelling_of_the_host_anywhere_in_the_line(ours: list[str], at: int) -> None:
    found = command.split([*HOST[:at], *ours, *HOST[at:]])
    assert found.argv == HOST
    assert found.modules == ["plugins.yolo"]


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        (["accel.accumulate=4"], {"accumulate": "4"}),
        (["accel.accumulate", "=", "4"], {"accumulate": "4"}),
        (["--accel.clip_norm=0.1,"], {"clip_norm": "0.1"}),
        (["accel.buckets=[64,", "128]"], {"buckets": "[64,128]"}),
        (["accel.config=a=b.yaml"], {"config": "a=b.yaml"}),
        (["accel.ema=off", "accel.ema=0.99"], {"ema": "0.99"}),
    ],
)
def test_accel_fields(ours: list[str], options: dict[str, str]) -> None:
    found = command.split([*ours, *HOST, "callbacks=a"])
    assert (found.argv, found.options) == (HOST, options)


def test_modules_add_up_and_none_is_doubled() -> None:
    assert command.split(["callbacks=a,b.c", "callbacks=[b.c,d]"], ["a"]).modules == ["a", "b.c", "d"]


def test_the_host_s_arguments_as_it_reads_them() -> None:
    assert command.split([*HOST, "callbacks=a", "detect", "show", "batch=4", "typo", "cls="]).host_args == {
        "mode": "train",
        "model": "yolov8n.yaml",
        "imgsz": [32, 64],
        "lr0": 0.1,
        "name": "a",
        "plots": False,
        "task": "detect",
        "show": True,
        "batch": 4,
    }


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["train", "callbacks"],
        ["train", "callbacks", "plugins.yolo"],
        ["-callbacks=a"],
        ["Callbacks=a"],
        ["callbacksx=a", "accelerate=1"],
        ["imgsz=[32,", "callbacks=a"],  # the host refuses the bracket
        ["project=", "callbacks=a", "train"],  # without ours, the host would read project=train
    ],
)
def test_what_is_not_ours_stays(line: list[str]) -> None:
    assert command.split(line).argv == line


WORD = st.sampled_from(["a", "lr0", "model", "plugins.yolo", "0.1", "x/y.pt", "é", "-v"])
UNIT = st.one_of(
    WORD.map(lambda a: [a]),
    st.tuples(WORD, WORD).map(lambda a: [f"--{a[0]}={a[1]},"]),
    st.tuples(WORD, WORD).map(lambda a: [a[0], "=", a[1]]),
    st.tuples(WORD, WORD).map(lambda a: [f"{a[0]}=", a[1]]),
    st.tuples(WORD, WORD).map(lambda a: [a[0], f"={a[1]}"]),
    st.tuples(WORD, WORD, WORD).map(lambda a: [f"{a[0]}=[{a[1]},", f"{a[2]}]"]),
)


@settings(deadline=None)  # a shared machine may pause
@given(st.lists(st.tuples(UNIT, st.sampled_from(["", "callbacks", "accel.f", "--callbacks"]))))
def test_everything_else_survives_any_interleaving(units: list[tuple[list[str], str]]) -> None:
    line, theirs = [], []
    for unit, key in units:
        if key and any("=" in part for part in unit):
            ours = merge_equals_args(unit)[0].partition("=")[2]
            line += [key, "=", ours]
        else:
            theirs += unit
            line += unit
    try:
        found = command.split(line)
    except CommandError:
        assert any(part == "accel.f" for part in line)
        assert "callbacks" not in line
        assert "--callbacks" not in line
    else:
        assert found.argv == theirs


FRAGMENT = st.sampled_from(
    ["a", "=", "k=", "=v", "k=v", "[", "]", ",", "", "callbacks=x", "callbacks", "callbacks=", "--accel.f=1", "[1,"]
)


@settings(deadline=None)  # a shared machine may pause
@given(st.lists(FRAGMENT, max_size=8))
def test_broken_lines_go_to_the_host_whole(line: list[str]) -> None:
    try:
        found = command.split(line)
    except CommandError:
        return
    if found.argv != line:  # ours came out: what is left reads as it did beside them
        joined = merge_equals_args(line)
        theirs = [a for a in joined if not a.startswith(("callbacks=", "--accel.f="))]
        assert merge_equals_args(found.argv) == theirs
