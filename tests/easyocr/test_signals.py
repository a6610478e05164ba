"""Signals to a run with loader workers, in a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import torch

SCRIPT = """
import json, os, sys, time, torch
torch.set_num_threads(1)
from integrations.easyocr.tensorboard_log import Board
from integrations.easyocr.stream import Lines
from plugins.easyocr import fit
options, workers, hangs = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "hangs"
shown, read = Board.training, Lines.__getitem__
def training(self, *args):
    shown(self, *args)
    print("training", flush=True)
def stuck(self, batch):
    if hangs and batch.epoch > 0:
        time.sleep(600)
    return read(self, batch)
Board.training, Lines.__getitem__ = training, stuck
result = fit(options, workers=workers, plan="off", say=lambda line: None)
print(result.stopped, flush=True)
"""


@pytest.fixture
def start():
    """Starts a run; whatever is left of it at the end is killed."""
    runs = []

    def begin(options, workers=2, how=""):
        command = [sys.executable, "-c", SCRIPT, json.dumps(options), str(workers), how]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen(command, start_new_session=True, **pipes))
        return runs[-1]

    yield begin
    for run in runs:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def workers_of(run):
    """Of a run that trains."""
    assert run.stdout.readline() == "training\n"
    found = psutil.Process(run.pid).children()
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_ends_as_one_to_the_run(start, tiny, tmp_path, number):
    run = start({**tiny, "num_iter": 100_000, "valInterval": 100_000})
    workers = workers_of(run)
    os.killpg(run.pid, number)
    told, errors = run.communicate(timeout=200)
    assert (run.returncode, told.splitlines()[-1], errors) == (0, "interrupted", "")
    folder = tmp_path / "runs" / "tiny_numbers"
    assert torch.load(folder / "last.pt", weights_only=True)["counts"]["updates"] >= 10
    assert (folder / "model" / "tiny_numbers.pth").is_file()
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_workers_do_not_outlive_a_run_that_is_killed(start, tiny):
    run = start({**tiny, "num_iter": 100_000, "valInterval": 100_000})
    workers = workers_of(run)
    run.kill()
    run.communicate(timeout=60)
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_a_worker_that_hangs_does_not_hold_up_the_end(start, tiny):
    run = start(tiny, 1, "hangs")  # in its second epoch, of which this run needs nothing
    told, errors = run.communicate(timeout=200)
    assert (run.returncode, told.splitlines()[-1], errors) == (0, "num_iter", "")
