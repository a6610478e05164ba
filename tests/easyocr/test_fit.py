"""The loop as a whole; the cases 916 and 923, every bad input, and what a run leaves behind."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from integrations.easyocr import mistakes_picture
from integrations.easyocr.prepare import Prepared
from integrations.easyocr.scoring import Score
from integrations.easyocr.tensorboard_log import Board
from plugins.easyocr import fit, training
from plugins.errors import AccelError
from tests.easyocr.conftest import write_folder

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


@pytest.mark.parametrize("workers", [0, 2])
def test_923_training_goes_on_past_the_first_epoch(tiny, workers):
    result = fit(tiny, workers=workers, num_iter=15, valInterval=5, **SILENT)
    assert [row.epoch for row in result.history] == [0, 1, 2]  # 24 lines, batches of 4
    assert result.updates == 15


def test_what_a_run_leaves_behind(tiny):
    result = fit(tiny, tensorboard=True, accumulate=2, ema=0.9, **SILENT)
    here = result.folder
    for name in ("last.pt", "best_accuracy.pth", "best_norm_ED.pth", "log.csv", "curves.png", "mistakes.png",
                 "accel_report.json", "accel_report.html", "model/tiny_numbers.pth",
                 "user_network/tiny_numbers.yaml", "user_network/tiny_numbers.py"):  # fmt: skip
        assert (here / name).stat().st_size > 0, name
    assert list((here / "tensorboard").iterdir())
    assert not list(here.glob(".*.tmp"))
    Image.open(here / "mistakes.png").verify()
    assert (here / "log.csv").read_text().splitlines()[0].startswith("update,epoch,train_loss,valid_loss,accuracy")
    state = torch.load(here / "last.pt", weights_only=True)
    assert not [name for name in state["model"] if "_orig_mod" in name or name.startswith("module.")]
    report = json.loads((here / "accel_report.json").read_text())
    assert report["window"]["updates"] == 6
    assert report["window"]["micro_batches"] == 12
    assert report["window"]["exact"]
    assert report["gradients"]["clip_norm"] == 5.0
    assert len({shape[3] for shape in report["shapes"]["seen"]}) <= len(report["shapes"]["buckets"]) <= 16
    assert 0 <= report["shapes"]["padding_fraction"] < 0.5
    reader = result.reader(detector=False)
    assert reader.character == "0123456789"


def test_the_reader_holds_the_weights_that_validated_best(tiny):
    result = fit(tiny, ema=0.9, **SILENT)
    best = torch.load(result.folder / "best_accuracy.pth", weights_only=True)
    read = torch.load(result.exported.files[0], weights_only=True)
    assert all(torch.equal(best[name], read[name]) for name in best)


def test_early_stopping(tiny):
    result = fit(tiny, lr=1e-12, num_iter=50, valInterval=2, patience=2, **SILENT)
    assert (result.stopped, result.updates) == ("patience", 6)


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


def test_frozen_parts_do_not_move_and_continuing_keeps_weights(tiny, tmp_path):
    first = fit(tiny, **SILENT)
    weights = str(first.exported.files[0])
    second = fit(
        {**tiny, "output": str(tmp_path / "second"), "saved_model": weights, "freeze_FeatureFxtraction": True},
        batchnorm="freeze", symbol="-", **SILENT,
    )  # fmt: skip
    before, after = (torch.load(r.exported.files[0], weights_only=True) for r in (first, second))
    assert all(torch.equal(before[n], after[n]) for n in before if "FeatureExtraction" in n)
    assert after["module.Prediction.bias"].numel() == 12
    assert any("characters added: -" in note for note in second.notes)


def test_hugging_face_data_sets_and_the_official_preprocessing(tiny):
    datasets = pytest.importorskip("datasets")
    from tests.easyocr.conftest import draw, numbers

    def make(seed):
        return datasets.Dataset.from_dict(
            {"image": [draw(n, seed) for n in numbers(8, seed)], "text": numbers(8, seed)},
            features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
        )

    result = fit(
        {**tiny, "train_data": "", "valid_data": ""}, train=make(1), valid=make(2), preprocess="official", imgW=160,
        num_iter=2, **SILENT,
    )  # fmt: skip
    assert result.updates == 2


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


def test_compiled_features_stay_within_the_budget_and_learn_the_same(tiny):
    # eps: Adam makes a step of its full size out of the rounding of a gradient that is nearly zero
    options = {"num_iter": 8, "eps": 1e-3, "compile": "on", "compile_backend": "eager", "buckets": [64, 96, 128, 192]}
    compiled = fit(tiny, **options, **SILENT)
    report = json.loads(compiled.report.read_text())
    assert report["compile"]["decision"] == "features"
    assert 1 <= report["compile"]["graphs"] <= report["compile"]["budget"]
    eager = fit({**tiny, "output": tiny["output"] + "_eager"}, **{**options, "compile": "off"}, **SILENT)
    ours, theirs = (torch.load(r.folder / "last.pt", weights_only=True)["model"] for r in (compiled, eager))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_the_memory_of_many_validations_is_flat(tiny):
    """20 validations in a process of its own: the resident size after the last is that after the fifth."""
    script = """
import json, sys, psutil
from integrations.easyocr.tensorboard_log import Board
from integrations.easyocr.prepare import Prepared
from plugins.easyocr import fit
sizes, real = [], Board.validated
def validated(self, *args):
    real(self, *args)
    sizes.append(psutil.Process().memory_info().rss)
Board.validated = validated
fit(json.loads(sys.argv[1]), num_iter=20, valInterval=1, say=lambda line: None)
print(json.dumps(sizes))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(tiny)], capture_output=True, text=True, check=True, timeout=300
    )
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 20
    assert sizes[-1] - sizes[4] < 24 * 2**20


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


def test_the_page_of_mistakes_is_of_the_exported_weights(tiny, monkeypatch):
    drawn = []
    monkeypatch.setattr(mistakes_picture, "mistakes", lambda readings, *_: drawn.append(readings))
    scores = iter([Score(0.9, 0.9, 8), Score(0.1, 0.1, 8), Score(0.0, 0.0, 8)])
    monkeypatch.setattr(training, "score", lambda read, labels: next(scores))
    kept = []
    with monkeypatch.context() as patch:
        read = Prepared.read
        patch.setattr(Prepared, "read", lambda self, *a: kept.append(read(self, *a)) or kept[-1])
        result = fit(tiny, lr=0.1, **SILENT)
    assert len(kept) == 2
    assert drawn == kept[:1]
    # A later process did not read them: it reads the exported file again, where no page is there.
    fit(tiny, resume=True, num_iter=9, lr=0.1, **SILENT)
    again = drawn[1]
    assert again.texts == kept[0].texts
    assert again.confidences == pytest.approx(kept[0].confidences)
    assert result.exported.files[0].is_file()


def test_882_right_to_left_labels_are_learnt_and_read_back_as_typed(tiny, tmp_path):
    letters = "אבג"
    labels = ["אבג", "גב 12", "בא", "ג 3"] * 3
    for part in ("train", "valid"):
        write_folder(tmp_path / part, labels)
    result = fit(tiny, lang_char=letters, symbol=" ", num_iter=2, valInterval=2, **SILENT)
    assert any("12 right-to-left labels" in note for note in result.notes)
    reader = result.reader(detector=False)
    assert reader.model_lang == "arabic"
    reader.converter.decode_greedy = lambda *_: ["12 בג"]
    assert reader.recognize(str(tmp_path / "valid" / "1.png"), detail=0) == ["גב 12"]
    visual = fit(
        tiny, lang_char=letters, symbol=" ", num_iter=1, label_order="visual", experiment_name="seen", **SILENT
    )
    assert visual.reader(detector=False).model_lang == "seen"
