"""Runs that were interrupted, resumed or begun where another one lies; the case 916."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from integrations.easyocr.prepare import Prepared
from plugins.easyocr import fit
from plugins.errors import AccelError
from tests.easyocr.conftest import write_folder
from tests.easyocr.runs import SILENT, assert_same_state, interrupt_at_show, table


@pytest.mark.parametrize("extra", [{}, {"workers": 2, "augment": True, "optim": "adamw"}])
def test_916_an_interrupted_run_that_is_resumed_equals_the_straight_one(tiny, monkeypatch, extra):
    options = {
        **tiny, **extra, "num_iter": 20, "valInterval": 4, "schedule": "onecycle", "warmup": 3,
        "accel": {"precision": "fp32", "ema": 0.9, "accumulate": 2},
    }  # fmt: skip
    straight = fit({**options, "output": tiny["output"] + "_straight"}, **SILENT)
    with monkeypatch.context() as patch:
        interrupt_at_show(patch)
        half = fit(options, **SILENT)
    assert (half.stopped, half.updates) == ("interrupted", 10)
    assert all(file.is_file() for file in half.exported.files)
    whole = fit(options, resume=True, **SILENT)
    assert (whole.stopped, whole.updates) == ("num_iter", 20)
    assert [row.update for row in whole.history] == [row.update for row in straight.history] == [4, 8, 12, 16, 20]
    assert table(whole) == table(straight)
    assert_same_state(whole.folder / "last.pt", straight.folder / "last.pt")
    for a, b in zip(whole.exported.files[:2], straight.exported.files[:2], strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_a_checkpoint_of_before_the_loss_was_saved_in_it(tiny):
    first = fit(tiny, num_iter=4, **SILENT)
    state = torch.load(first.folder / "last.pt", weights_only=True)
    assert state["extra"].pop("pace") == {"loss": 0.0, "samples": 0}
    torch.save(state, first.folder / "last.pt")
    assert fit(tiny, resume=True, **SILENT).updates == 6


@pytest.mark.parametrize("every", [3, 4], ids=["in the loop", "after it"])
def test_ctrl_c_in_the_very_last_validation_loses_nothing(tiny, monkeypatch, every):
    tiny = {**tiny, "valInterval": every}
    straight = fit({**tiny, "output": tiny["output"] + "_straight"}, **SILENT)
    original = Prepared.read

    def asked(*args):
        if len(calls) == 1:  # the second validation is the last
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(1)
        return original(*args)

    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(Prepared, "read", asked)
        done = fit(tiny, **SILENT)
    assert (done.stopped, done.updates, len(calls)) == ("num_iter", 6, 2)
    assert table(done) == table(straight)
    assert_same_state(done.folder / "last.pt", straight.folder / "last.pt")
    for name in ("best_accuracy.pth", "mistakes.png", "accel_report.json"):
        assert (done.folder / name).is_file()
    assert all(file.is_file() for file in done.exported.files)
    lines = []
    again = fit(tiny, resume=True, say=lines.append)
    assert (again.stopped, again.updates) == ("num_iter", 6)
    assert any("num_iter=6" in line and "already" in line for line in lines)
    assert table(again) == table(straight)
    assert fit(tiny, num_iter=8, resume=True, **SILENT).updates == 8


def test_nothing_written_before_is_lost(tiny):
    first = fit(tiny, **SILENT)
    before = (first.folder / "last.pt").read_bytes()
    with pytest.raises(AccelError, match=r"last.pt is there already; resume=True \(--resume\) goes on"):
        fit(tiny, **SILENT)
    with pytest.raises(AccelError, match="of another model: FeatureExtraction"):
        fit({**tiny, "output_channel": 32}, resume=True, **SILENT)
    with pytest.raises(AccelError, match="its character set is '0123456789'"):
        fit({**tiny, "number": "9876543210"}, resume=True, **SILENT)
    with pytest.raises(AccelError, match="saved without an EMA"):
        fit(tiny, ema=0.9, resume=True, **SILENT)
    assert (first.folder / "last.pt").read_bytes() == before
    (first.folder / "last.pt").write_bytes(before[:1000])
    with pytest.raises(AccelError, match=r"last.pt: not readable as a checkpoint"):
        fit(tiny, resume=True, **SILENT)


def test_a_resumed_run_with_other_data_begins_the_order_anew(tiny, tmp_path):
    fit(tiny, **SILENT)
    write_folder(tmp_path / "train", ["123"] * 9, seed=5)
    lines = []
    fit(tiny, num_iter=8, resume=True, say=lines.append)
    assert any("the order of lines begins anew" in line for line in lines)


def test_an_earlier_run_is_not_written_over(tiny, tmp_path):
    first = fit(tiny, say=lambda line: None)
    other = fit({**tiny, "experiment_name": "other_numbers"}, say=lambda line: None)
    kept = {path: path.read_bytes() for path in first.folder.rglob("*.pt*") if path.is_file()}
    with pytest.raises(AccelError, match=r"last\.pt is there already"):
        fit(tiny, resume=other.folder / "last.pt", say=lambda line: None)
    (first.folder / "last.pt").unlink()
    with pytest.raises(AccelError, match=r"best_accuracy\.pth is there already; another experiment_name"):
        fit(tiny, say=lambda line: None)
    assert all(path.read_bytes() == data for path, data in kept.items() if path.name != "last.pt")


def test_going_on_from_another_run_decides_anew_what_is_best(tiny):
    first = fit(tiny, say=lambda line: None)
    third = fit(
        {**tiny, "experiment_name": "third_numbers", "num_iter": tiny["num_iter"] + 2},
        resume=first.folder / "last.pt", say=lambda line: None,
    )  # fmt: skip
    assert (third.folder / "best_accuracy.pth").is_file()
    assert all(path.is_file() for path in third.exported.files)


def test_the_optimizer_goes_on_as_it_was_saved_and_says_so(tiny):
    fit(tiny, say=lambda line: None)
    lines = []
    fit({**tiny, "lr": 123.0, "num_iter": tiny["num_iter"] + 1}, resume=True, say=lines.append)
    assert any("the optimizer goes on as it was saved, with lr=" in line for line in lines)


def test_another_optimizer_on_a_resume_is_one_line(tiny):
    first = fit(tiny, say=lambda line: None)
    kept = (first.folder / "last.pt").read_bytes()
    with pytest.raises(AccelError, match="saved with another optimizer"):
        fit(
            {**tiny, "optim": "adadelta" if tiny.get("optim") == "adam" else "adam"}, resume=True, say=lambda line: None
        )
    assert (first.folder / "last.pt").read_bytes() == kept


def test_a_resumed_run_takes_the_schedule_that_it_is_given(tiny):
    lines = []
    fit(tiny, schedule="cosine", **SILENT)
    changed = fit(tiny, schedule="onecycle", num_iter=12, resume=True, say=lines.append)
    straight = fit({**tiny, "experiment_name": "straight"}, schedule="onecycle", num_iter=12, **SILENT)
    assert [row.lr for row in changed.history[2:]] == [row.lr for row in straight.history[2:]]
    assert not any("goes on as it was saved" in line for line in lines)


def test_two_runs_at_once_in_one_folder(tiny):
    lines = []

    def again(line):
        if not lines:
            lines.append(line)
            with pytest.raises(AccelError, match="another run writes here"):
                fit(tiny, resume=False, say=lambda line: None)

    fit({**tiny, "saved_model": "", "accel": {"batchnorm": "host"}, "batch_size": 4}, say=again)
    assert lines
