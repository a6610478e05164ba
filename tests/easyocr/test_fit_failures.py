"""What goes wrong in a training: mistakes of the user, bad pictures, lost updates, a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from plugins.easyocr import fit, training
from plugins.errors import AccelError
from tests.easyocr.conftest import write_folder
from tests.easyocr.runs import SILENT


def test_an_infinite_gradient_is_skipped(tiny, monkeypatch):
    real, calls = training.ctc_loss, []

    def sometimes(logits, *labels):
        calls.append(1)
        return real(logits, *labels) * (float("inf") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(training, "ctc_loss", sometimes)
    result = fit(tiny, **SILENT)
    report = json.loads(result.report.read_text())
    assert report["window"]["skipped_updates"] == 1
    assert all(t.isfinite().all() for t in torch.load(result.exported.files[0], weights_only=True).values())
    calls.clear()
    with pytest.raises(AccelError, match="nonfinite=stop"):
        fit(tiny, nonfinite="stop", output=tiny["output"] + "_stop", **SILENT)


def test_a_learning_rate_that_explodes_ends_the_run(tiny):
    lines = []
    result = fit(tiny, lr=1e30, num_iter=1000, valInterval=1000, say=lines.append)
    assert result.stopped == "diverged"
    assert 100 <= result.updates <= 110
    assert sum("20 updates in a row were skipped" in line for line in lines) == 1
    assert sum("it diverged" in line and f"update {result.updates} of 1000" in line for line in lines) == 1
    assert all(file.is_file() for file in result.exported.files)
    assert (result.folder / "best_accuracy.pth").is_file()
    again = fit(tiny, lr=1e30, num_iter=1000, valInterval=1000, resume=True, **SILENT)
    assert (again.stopped, again.updates) == ("diverged", result.updates + 100)


def test_infeasible_labels_and_lost_pictures_are_counted_and_training_goes_on(tiny, tmp_path):
    folder = write_folder(tmp_path / "odd", ["11111111111", *["12"] * 11], seed=9)
    Image.open(folder / "0.png").resize((33, 40)).save(folder / "0.png")
    lines = []
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:60])  # its header is whole
    result = fit({**tiny, "train_data": str(folder)}, say=lines.append)
    assert result.infeasible > 0
    assert result.unreadable == [str(folder / "5.png")]
    assert any("cannot be decoded" in line and "5.png" in line for line in lines)
    assert any("needed more frames" in line for line in lines)


def test_a_set_without_one_good_picture_is_an_error_and_not_an_endless_loop(tiny, tmp_path):
    for path in (tmp_path / "train").glob("*.png"):
        path.write_bytes(path.read_bytes()[:60])
    lines = []
    with pytest.raises(AccelError, match="none of its pictures can be decoded"):
        fit(tiny, say=lines.append)
    assert sum("the picture cannot be decoded" in line for line in lines) == 20
    assert "more pictures cannot be decoded" in lines[-1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train_data": ""}, "train_data=''"),
        ({"train_data": "no/such/folder"}, "no/such/folder: no such folder"),
        ({"number": "abc"}, "no line is left to train on"),
        ({"experiment_name": "test"}, "experiment_name='test'"),
        ({"lang_list": ["en", "klingon"]}, "'klingon' unknown to EasyOCR"),
        ({"saved_model": "none.pth"}, "saved_model=none.pth: no such file"),
        ({"Prediction": "Attn"}, "Prediction='Attn'"),
        ({"accel": {"compile_mode": "fast"}}, "compile_mode=fast: allowed are"),
        ({"accel": {"precision": "fp16"}}, "precision=fp16: not on a CPU"),
        ({"accel": {"compile": "on", "compile_scope": ["nothing*"]}}, "compile_scope=nothing*"),
        ({"select_data": "no_such"}, "no_such: no such folder"),
        ({"nonsense": 1}, "nonsense=1: unknown key"),
        ({"valid_data": __file__}, f"valid_data={__file__}: is a file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tiny, tmp_path, change, told):
    with pytest.raises(AccelError) as error:
        fit({**tiny, **change}, **SILENT)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_an_output_that_is_a_file(tiny, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(AccelError, match="output="):
        fit({**tiny, "output": str(tmp_path / "taken")}, say=lambda line: None)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", ["log.csv", "last.pt", "model/tiny_numbers.pth", "mistakes.png"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_training(tiny, name):
    folder = Path(tiny["output"]) / tiny["experiment_name"]
    (folder / name).mkdir(parents=True)
    before = sorted(folder.rglob("*"))
    with pytest.raises(AccelError, match=f"{name}: is a folder"):
        fit(tiny, **SILENT)
    assert sorted(folder.rglob("*")) == before


def test_a_path_that_none_can_be_is_one_line(tiny):
    with pytest.raises(AccelError, match="no such folder"):
        fit(tiny, train="a\0b", **SILENT)


def test_a_full_disk_is_one_line_and_what_was_saved_is_untouched(tiny, monkeypatch):
    first = fit(tiny, **SILENT)
    before = (first.folder / "last.pt").read_bytes()

    def full(path, fill):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(training, "write_atomically", full)
    with pytest.raises(AccelError, match=r"log\.csv: No space left on device") as caught:
        fit(tiny, num_iter=12, resume=True, **SILENT)
    assert "\n" not in str(caught.value)
    assert (first.folder / "last.pt").read_bytes() == before


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_log_of_tensorboard_that_cannot_be_written_ends_no_training(tiny, monkeypatch, when):
    folder, lines = Path(tiny["output"]) / tiny["experiment_name"], []
    if when == "at the start":
        folder.mkdir(parents=True)
        (folder / "tensorboard").touch()
    else:

        def full(self, *args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    result = fit({**tiny, "tensorboard": True}, say=lines.append)
    assert (result.stopped, result.updates) == ("num_iter", 6)
    assert sum("TensorBoard's log is given up" in line for line in lines) == 1


def test_a_validation_set_without_one_good_picture_is_one_line_and_what_was_trained_is_kept(tiny, tmp_path):
    for picture in (tmp_path / "valid").glob("*.png"):
        data = picture.read_bytes()
        picture.write_bytes(data[: len(data) // 2])
    with pytest.raises(AccelError, match="valid_data: none of its pictures can be decoded"):
        fit({**tiny, "valInterval": 1000}, say=lambda line: None)
    assert (tmp_path / "runs" / "tiny_numbers" / "last.pt").is_file()


def test_lines_lost_to_a_setting_are_told_before_training_and_at_its_end(tiny):
    said = []
    result = fit(tiny, batch_max_length=3, say=said.append)
    told = " ".join(said)
    (lost,) = (note for note in result.notes if "keeps them all" in note and note.startswith("training"))
    assert re.fullmatch(
        r"training data: \d+ of 24 lines are lost, labels longer than batch_max_length=3: batch_max_length: 6 "
        "keeps them all",
        lost,
    )
    assert re.fullmatch(r"trained on \d+ of 24 lines", result.notes[-1])
    assert told.index(lost) < told.index(result.notes[-1])
