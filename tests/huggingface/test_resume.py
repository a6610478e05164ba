"""A resumed run equals a straight one bit for bit; checkpoints are complete or absent (cases 22082, 35525)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from integrations.huggingface import checkpoint_folders
from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.runs import STATEFUL, losses, report, trainer_for

ROOT = Path(__file__).parents[2]
RUN = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    **STATEFUL,
}


def with_dropout():
    """A model whose training draws random numbers, so that the random state counts."""
    model = model_for("bert-token")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def start(folder, options, **more):
    return trainer_for("bert-token", folder, 7, options=options, model=with_dropout(), **{**RUN, **more})


@pytest.fixture(scope="module", params=[{}, {"ema": 0.9}], ids=["plain", "ema"])
def straight(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    trainer, spy = start(folder, request.param)
    trainer.train()
    return folder, request.param, trainer, spy


def test_case_22082_windows(straight):
    folder, _, trainer, _ = straight
    assert trainer.state.global_step == 6
    facts = report(folder)["window"]
    assert (facts["updates"], facts["micro_batches"], facts["partial_windows"]) == (6, 14, 2)
    assert report(folder)["checkpoints"] == [f"checkpoint-{n}" for n in range(1, 7)]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_case_22082_resume(straight, step, tmp_path):
    folder, options, trainer, spy = straight
    again, spied = start(tmp_path, options)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    for ours, right in zip(spied.weights, spy.weights[step:], strict=True):
        assert all(torch.equal(ours[name], right[name]) for name in right)
    ours, right = again.model.state_dict(), trainer.model.state_dict()
    assert all(torch.equal(ours[name], right[name]) for name in right)
    assert losses(again) == losses(trainer)
    for name in ("model.safetensors", "optimizer.pt"):
        one, other = (path / "checkpoint-6" / name for path in (tmp_path, folder))
        if name.endswith(".pt"):
            a, b = (torch.load(path, weights_only=True) for path in (one, other))
            assert str(a["param_groups"]) == str(b["param_groups"])
            assert all(torch.equal(a["state"][k][n], b["state"][k][n]) for k in b["state"] for n in b["state"][k])
        else:
            assert one.read_bytes() == other.read_bytes()
    assert report(tmp_path)["window"]["updates"] == 6


def test_the_saved_weights_are_the_averaged_ones(straight):
    folder, options, _, spy = straight
    import safetensors.torch

    saved = safetensors.torch.load_file(folder / "checkpoint-3" / "model.safetensors")
    state = torch.load(folder / "checkpoint-3" / checkpoint_folders.STATE, weights_only=True)
    live = spy.weights[2]
    same = all(torch.equal(saved[name], live[name]) for name in saved)
    if not options:
        assert same
        return
    assert not same
    assert all(torch.equal(state["raw"][name], live[name]) for name in saved)
    shadow = {n: t.clone() for n, t in with_dropout().state_dict().items()}
    for update, weights in enumerate(spy.weights[:3], start=1):
        decay = min(0.9, (1 + update) / (10 + update))
        shadow = {n: decay * s + (1 - decay) * weights[n] for n, s in shadow.items()}
    for name in saved:
        torch.testing.assert_close(saved[name], shadow[name], rtol=1e-5, atol=1e-7)


def test_ema_is_evaluated_and_kept_at_the_end(tmp_path):
    trainer, spy = start(tmp_path, {"ema": 0.5}, num_train_epochs=1, eval_steps=1)
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    model = type(trainer.model).from_pretrained(tmp_path / "checkpoint-3", attn_implementation="eager").eval()
    with torch.no_grad():
        loss = model(**batch_for("bert-token", 7, uneven=True)).loss
    assert evaluated[-1] == pytest.approx(float(loss), rel=2e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(loss), rel=2e-6)
    assert not torch.equal(spy.weights[-1]["classifier.weight"], trainer.model.classifier.weight)
    assert torch.equal(model.classifier.weight, trainer.model.classifier.weight)
    assert report(tmp_path)["ema"] == {"decay": 0.5, "updates": 3}


def test_the_average_of_a_bf16_model_moves_and_resumes_bit_for_bit(tmp_path):
    """1 - decay = 0.001 of a bf16 number is rounded away: an average kept in bf16 would stand still."""

    def run(folder, resume=None):
        model = with_dropout().to(torch.bfloat16)
        options = {"options": {"ema": 0.999}, "model": model, **RUN, "optim": "sgd", "learning_rate": 0.5}
        trainer, _ = trainer_for("bert-token", folder, 7, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict(), folder / "checkpoint-6"

    straight, last = run(tmp_path / "straight")
    resumed, again = run(tmp_path / "resumed", str(tmp_path / "straight" / "checkpoint-3"))
    states = [torch.load(folder / checkpoint_folders.STATE, weights_only=True) for folder in (last, again)]
    wider = [state["average_wider"] for state in states]
    assert {tensor.dtype for tensor in wider[0].values()} == {torch.float32}
    assert all(torch.equal(wider[0][name], wider[1][name]) for name in wider[0])
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    first = torch.load(tmp_path / "straight" / "checkpoint-5" / checkpoint_folders.STATE, weights_only=True)
    assert not torch.equal(first["average_wider"]["classifier.weight"], wider[0]["classifier.weight"])


def test_load_best_model_at_end_agrees_with_what_was_measured(tmp_path):
    trainer, _ = start(
        tmp_path,
        {"ema": 0.5},
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        eval_steps=1,
        save_total_limit=2,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path
    assert checkpoint_folders.problems(best) == []
    state = json.loads((best / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]) == best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=2e-6)
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 2


def test_resume_of_a_checkpoint_without_the_plug(tmp_path):
    plain, _ = trainer_for("bert-token", tmp_path, 7, plug=False, **RUN)
    plain.train()
    (tmp_path / "checkpoint-6").rename(tmp_path / "gone")
    trainer, _ = start(tmp_path, {"ema": 0.9})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == 6
    assert any("saved without ema" in line for line in report(tmp_path)["warnings"])


# -- complete or absent --


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state.pth"])
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_half_a_checkpoint_is_recognised(name, how, straight, tmp_path):
    import shutil

    shutil.copytree(straight[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.copytree(straight[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    assert checkpoint_folders.newest_complete(tmp_path) == (tmp_path / "checkpoint-4", [])
    target = tmp_path / "checkpoint-4" / name
    if how == "cut":
        cut(target)
    elif name in ("optimizer.pt", "rng_state.pth"):
        return  # save_only_model leaves them out
    else:
        target.unlink()
    found, passed = checkpoint_folders.newest_complete(tmp_path)
    assert found == tmp_path / "checkpoint-3"
    assert name.split(".")[0].split("_")[0] in passed[0]


KILLED = """
    import os, signal, sys, random
    from tests.huggingface import test_resume
    import torch
    count, at = 0, int(sys.argv[2])
    def kill_at(original):
        def write(*args, **kwargs):
            global count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return write
    trainer, _ = test_resume.start(sys.argv[1], {"ema": 0.9})
    torch.save = kill_at(torch.save)
    import safetensors.torch, pathlib
    pathlib.Path.rename = kill_at(pathlib.Path.rename)
    os.fsync = kill_at(os.fsync)
    trainer.train(resume_from_checkpoint=True if sys.argv[3] == "resume" else None)
"""


def killed(folder: Path, at: int, resume: bool = False) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(at), "resume" if resume else "new"]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=400).returncode


@pytest.mark.parametrize("at", [22, 31, 37])
def test_case_35525_killed_while_saving(at, straight, tmp_path):
    if not straight[1]:
        pytest.skip("killed once, with ema")
    assert killed(tmp_path, at) == -signal.SIGKILL
    complete = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert complete
    assert all(checkpoint_folders.problems(tmp_path / name) == [] for name in complete)
    trainer, _ = start(tmp_path, {"ema": 0.9})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    right = straight[2].model.state_dict()
    assert all(torch.equal(t, right[n]) for n, t in trainer.model.state_dict().items())


def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, monkeypatch):
    trainer, _ = start(tmp_path, {})
    write = torch.save

    def full(what, path, *args, **kwargs):
        if "checkpoint-2" in str(path) and str(path).endswith("optimizer.pt"):
            raise OSError(28, "No space left on device", str(path))
        return write(what, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left on device: .*optimizer\.pt"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-1"]
    assert checkpoint_folders.problems(tmp_path / "checkpoint-1") == []


def test_a_checkpoint_is_replaced_whole(tmp_path):
    final = tmp_path / "checkpoint-3"
    for text in ("old", "new"):
        with checkpoint_folders.unfinished(final, True, lambda: None) as temporary:
            (temporary / final.name).mkdir()
            (temporary / final.name / "file").write_text(text)
    assert (final / "file").read_text() == "new"
    final.rename(tmp_path / ".replaced-checkpoint-3")
    (tmp_path / ".unfinished-checkpoint-3").mkdir()
    checkpoint_folders.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


class WritesItself(Trainer):
    """Keeps a folder of its own form, as the host's users do."""

    def _save_checkpoint(self, model, trial):
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        super()._save_checkpoint(model, trial)
        (folder / "mine.txt").write_text("kept")


class WritesNothing(Trainer):
    def _save_checkpoint(self, model, trial):
        pass


@pytest.mark.parametrize("kind", [WritesItself, WritesNothing])
def test_a_save_checkpoint_of_the_user_is_left_its_way(kind, tmp_path):
    trainer, _ = trainer_for("bert-token", tmp_path, 4, kind=kind, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert folders == (["checkpoint-1", "checkpoint-2"] if kind is WritesItself else [])
    for name in folders:
        assert (tmp_path / name / "mine.txt").read_text() == "kept"
        assert (tmp_path / name / "accel_state.pt").is_file()
    assert not list(tmp_path.glob(".unfinished-*"))


def test_a_file_of_the_user_does_not_spoil_a_checkpoint(tmp_path):
    trainer, _ = trainer_for("bert-token", tmp_path, 4, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    (tmp_path / "checkpoint-1" / "notes.pt").write_text("not a zip")
    assert checkpoint_folders.problems(tmp_path / "checkpoint-1") == []
