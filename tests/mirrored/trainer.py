"""A whole run of the Hugging Face Trainer on mirror, its evaluations, checkpoints and resume included."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import Trainer, TrainerCallback

from plugins.hf import AccelCallback
from tests import mirror
from tests.core.tiny import same
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.runs import arguments, report

ROWS = 7  # of one each: windows of three, and a tail of one
SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
FULL = {**SPLIT, "max_grad_norm": 0.5, "eval_strategy": "epoch", "learning_rate": 0.1, "optim": "adamw_torch"}
AN_UPDATE = 1  # read: the norm, which also tells what is not finite
SCALE = 1024.0
PRECISIONS = ["fp32", "bf16", "fp16"]


@pytest.fixture(autouse=True)
def _bf16_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks CUDA and its like by name."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)


class Updates(TrainerCallback):
    """The values read from the device until each update's end."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.reads.append(mirror.reads())


def run(folder: Path, plug: bool = True, on: str = "mirror", precision: str = "fp32", **more: Any) -> tuple[Any, Any]:
    """One run; in `more`, `options` are the plug's and `change` is (a column, rows, what they hold instead)."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it holds the device of the run before
    os.environ["ACCELERATE_TORCH_DEVICE"] = on
    options = {"plan": "off", "compile": "off", "ema": 0.9, **more.pop("options", {})}
    resume, wrong = more.pop("resume", None), more.pop("wrong", None)
    head, kind = more.pop("head", "bert-token"), more.pop("kind", Trainer)
    batch = batch_for(head, ROWS, uneven=True)
    if change := more.pop("change", None):
        column, rows, value = change
        batch[column][rows] = value
    half = {"bf16": True} if precision == "bf16" else {}
    updates = Updates()
    trainer = kind(
        model=model_for(head),
        args=arguments(folder, **{**FULL, "use_cpu": on == "cpu", **half, **more}),
        train_dataset=Rows(batch),
        eval_dataset=Rows(batch),
        callbacks=[*([AccelCallback(**options)] if plug else []), updates, *([wrong] if wrong else [])],
    )
    if precision == "fp16":
        _in_fp16(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, updates


def _in_fp16(trainer: Trainer) -> None:
    """What accelerate does at fp16=True, on devices that it knows."""
    held = trainer.accelerator
    held.state._mixed_precision, held.native_amp = "fp16", True
    held.scaler = torch.amp.GradScaler("mirror", init_scale=SCALE)
    trainer.args.fp16 = True


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}


def evaluations(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_equals_the_cpu_s(precision: str, tmp_path: Path) -> None:
    ours, theirs = (run(tmp_path / on, on=on, precision=precision, optim="sgd")[0] for on in ("mirror", "cpu"))
    assert ours.args.device.type == "mirror"
    found, wanted = weights(ours), weights(theirs)
    limit = 1e-6 if precision == "fp32" else 2e-2  # mirror's autocast casts fewer operators than a CPU's
    assert max(float((found[n] - wanted[n]).abs().max()) for n in wanted) <= limit
    assert evaluations(ours) == pytest.approx(evaluations(theirs), rel=limit)
    facts = report(tmp_path / "mirror")
    assert (facts["device"], facts["memory"]["kind"]) == ("mirror", "mirror")
    assert (facts["window"]["updates"], facts["window"]["partial_windows"]) == (6, 2)


class Prepares(Trainer):
    """May change the labels, as far as the plug knows."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


@pytest.mark.parametrize(
    ("precision", "head", "kind"),
    [
        *((p, "bert-token", Trainer) for p in PRECISIONS),
        ("fp32", "bert-question", Trainer),
        ("fp32", "bert-token", Prepares),
    ],
)
def test_no_read_of_our_own_a_micro_batch_and_one_an_update(
    precision: str, head: str, kind: type[Trainer], tmp_path: Path
) -> None:
    quiet = {"logging_strategy": "no", "eval_strategy": "no"}  # a log reads the loss
    with_plug, alone = (
        run(tmp_path / str(plug), plug, precision=precision, head=head, kind=kind, **quiet)[1].reads
        for plug in (True, False)
    )
    ours, hosts = ([b - a for a, b in pairwise(reads)] for reads in (with_plug, alone))
    more = [mine - theirs for mine, theirs in zip(ours, hosts, strict=True)]
    assert len(more) == 5  # windows of one micro-batch and of three: it is not one a micro-batch
    assert all(reads <= AN_UPDATE for reads in more), (ours, hosts)


def test_micro_batch_window_and_tail_of_no_labels_that_count_add_nothing(tmp_path: Path) -> None:
    none = ("labels", [1, 3, 4, 5, 6], -100)
    ours, theirs = (run(tmp_path / on, on=on, change=none, optim="sgd")[0] for on in ("mirror", "cpu"))
    found, wanted = weights(ours), weights(theirs)
    assert max(float((found[n] - wanted[n]).abs().max()) for n in wanted) <= 1e-6
    logged = ([e["loss"] for e in trainer.state.log_history if "loss" in e] for trainer in (ours, theirs))
    assert next(logged) == pytest.approx(next(logged), rel=1e-5)
    assert report(tmp_path / "mirror")["window"]["skipped_updates"] == 0


def test_answers_outside_the_input_at_one_end_are_told_of_at_the_run_s_end(tmp_path: Path) -> None:
    run(tmp_path, head="bert-question", change=("end_positions", [4], 1000), eval_strategy="no", max_steps=2)
    assert any("answers outside the input" in term for term in report(tmp_path)["window"]["approximate_terms"])


class Infinite(TrainerCallback):
    """Makes the gradients of the second update infinite; keeps what stood before it and after it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.hook = next(model.parameters()).register_hook(lambda grad: grad * float("inf"))
            self.keep(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.hook.remove()
            self.keep(model)

    def keep(self, model: Any) -> None:
        self.seen.append({n: t.cpu().clone() for n, t in model.state_dict().items()})


def test_infinite_gradient_in_fp16_skips_the_update(tmp_path: Path) -> None:
    wrong = Infinite()
    trainer, _ = run(tmp_path, precision="fp16", wrong=wrong)
    assert same(*wrong.seen)
    found = report(tmp_path)
    assert (found["window"]["skipped_updates"], found["ema"]["updates"]) == (1, 5)
    assert trainer.accelerator.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resumed_run_equals_the_straight_one(precision: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "epoch", "precision": precision}
    straight, _ = run(tmp_path / "straight", **saving)
    first = tmp_path / "straight" / "checkpoint-3"
    rest, _ = run(tmp_path / "rest", resume=str(first), **saving)
    assert same(weights(rest), weights(straight))
