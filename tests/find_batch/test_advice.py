"""The command that is printed: the user's own, with the sizes that were found."""

from __future__ import annotations

import shlex

import pytest

from plugins.find_batch.advice import advise, with_argument

SIZES = {"effective_batch": 64}


@pytest.mark.parametrize(
    ("command", "settings", "wanted"),
    [
        (
            "yolo train model=a.pt batch=4 accel.accumulate=2 data=b.yaml",
            SIZES,
            "yolo train model=a.pt data=b.yaml batch=16 accel.effective_batch=64 callbacks=plugins.yolo",
        ),
        (
            "yolo train model=a.pt callbacks=mine accel.effective_batch=8 accel.ema=0.9",
            {**SIZES, "precision": "bf16"},
            "yolo train model=a.pt callbacks=plugins.yolo,mine accel.ema=0.9 batch=16 accel.effective_batch=64 "
            "accel.precision=bf16",
        ),
        ("yolo train model=a.pt callbacks=plugins.yolo", {}, "yolo train model=a.pt callbacks=plugins.yolo batch=16"),
        (
            "python -m plugins.yolo train batch=-1",
            SIZES,
            "python -m plugins.yolo train batch=16 accel.effective_batch=64",
        ),
        (
            "accel fit lines.yaml batch_size=32 accumulate=2 lr=0.1",
            SIZES,
            "accel fit lines.yaml lr=0.1 batch_size=16 effective_batch=64",
        ),
    ],
)
def test_key_value_commands_hold_all_of_it(command: str, settings: dict[str, object], wanted: str) -> None:
    made = advise(shlex.split(command), 16, settings, "ultralytics")
    assert (made.line, made.by_hand) == (wanted, [])


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("python t.py --per_device_train_batch_size 4 --lr 1", "python t.py --per_device_train_batch_size 16 --lr 1"),
        ("python t.py --per-device-train-batch-size=4", "python t.py --per-device-train-batch-size=16"),
        ("./t.py --batch-size 4", "./t.py --batch-size 16"),
    ],
)
def test_a_scripts_own_option_is_set_and_the_rest_goes_by_the_environment(command: str, wanted: str) -> None:
    made = advise(shlex.split(command), 16, SIZES, "huggingface")
    assert made.line == f"ACCEL_EFFECTIVE_BATCH=64 {wanted}"
    assert made.by_hand == []


@pytest.mark.parametrize(
    ("host", "place"),
    [("huggingface", "per_device_train_batch_size=16"), ("ultralytics", "model.train(batch=16)"), ("", "size: 16")],
)
def test_a_script_whose_arguments_are_unknown_is_told_what_to_change(host: str, place: str) -> None:
    made = advise(["python", "my train.py", "--batches", "3"], 16, SIZES, host)
    assert made.line == "ACCEL_EFFECTIVE_BATCH=64 python 'my train.py' --batches 3"
    assert place in made.by_hand[0]


def test_an_argument_of_the_hosts_own_is_laid_over_where_the_command_takes_one() -> None:
    freeze = {"ultralytics": "freeze=10", "easyocr": "freeze_X=True"}
    assert with_argument(["yolo", "train", "freeze=2"], freeze) == ["yolo", "train", "freeze=10"]
    assert with_argument(["accel", "fit", "a.yaml"], freeze) == [
        "accel",
        "fit",
        "a.yaml",
        "freeze_X=True",
    ]
    assert with_argument(["python", "train.py"], freeze) is None
    assert with_argument(["yolo", "train"], {}) is None
