"""A trial of a fit, as `accel preflight` and `accel find-batch` make it: in its own folder, at its own micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.preflight import trials as trials_of
from plugins.preflight.gradients import exact
from plugins.preflight.trials import Job, Trials
from plugins.preflight.verdict import Verdict
from plugins.trial_run import child
from tests.preflight.conftest import AT_EXIT, run_here

SCRIPT = """
import lightning.pytorch as L
from lightning.pytorch.loggers import TensorBoardLogger
from plugins.lightning import AccelLightning
from tests.lightning.runs import Module, loader

L.seed_everything(0)
L.Trainer(
    max_epochs=4, accumulate_grad_batches=2, default_root_dir="user", logger=TensorBoardLogger("user"),
    accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False, callbacks=[AccelLightning()],
).fit(Module(), loader(4, shuffle=True))
"""


@pytest.mark.parametrize("files", [["accel_report.json"], []], ids=["with a file", "empty"])
def test_a_window_of_a_fit_is_compared_with_its_big_batch_and_the_users_folder_stays_as_it_is(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning divides the loss by K itself, and its backward runs inside the optimizer's step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(trials_of, "run", run_here)
    monkeypatch.setattr(child, "at_exit", AT_EXIT.append)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "user").mkdir()
    for name in files:
        (tmp_path / "user" / name).write_text("mine", encoding="utf-8")
    seen: Any = Trials(Job(["python", "train.py"], tmp_path / "trials", 2))
    seen.compiled = seen.first  # asked for its buckets alone
    found = exact(seen)
    assert found.verdict is Verdict.PASS, found
    assert found.figure.startswith("2 micro-batches against one batch of 8")
    assert (tmp_path / "user").is_dir()
    assert [path.name for path in (tmp_path / "user").rglob("*")] == files
