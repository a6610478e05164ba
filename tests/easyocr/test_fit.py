"""The loop as a whole; the case 923, and what a run leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from integrations.easyocr import mistakes_picture
from integrations.easyocr.prepare import Prepared
from integrations.easyocr.scoring import Score
from plugins.easyocr import fit, training
from tests.easyocr.conftest import write_folder
from tests.easyocr.runs import SILENT


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
