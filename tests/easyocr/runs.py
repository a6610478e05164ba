"""What the tests of whole trainings share."""

from __future__ import annotations

import csv
import os
import signal

import torch

from integrations.easyocr.tensorboard_log import Board

SILENT = {"say": lambda line: None}


def flat(value, path=""):
    """(path, leaf) of everything in a checkpoint, timings and what is told of the plan excepted."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("history", "config", "switches"):
                yield from flat(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{path}/{number}")
    else:
        yield path, value


def assert_same_state(a, b):
    ours, theirs = (dict(flat(torch.load(path, weights_only=True))) for path in (a, b))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        same = torch.equal(value, theirs[path]) if isinstance(value, torch.Tensor) else value == theirs[path]
        assert same, path


def table(result):
    """log.csv without its column of speeds."""
    with (result.folder / "log.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in csv.DictReader(file)]


def interrupt_at_show(monkeypatch):
    """Ctrl-C when the board is next shown, which is at update 10."""
    original = Board.training

    def training(self, *args):
        original(self, *args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Board, "training", training)
