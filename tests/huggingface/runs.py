"""Short runs of a real Trainer on the CPU, for the tests."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from integrations.huggingface import versions
from plugins.hf import AccelCallback
from tests.huggingface.heads import Rows, batch_for, model_for

ON = {"compile": "on", "compile_backend": "aot_eager"}


def arguments(folder: Path | str, **more: Any) -> TrainingArguments:
    """Quiet, deterministic arguments for a CPU; `more` wins."""
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "remove_unused_columns": False,
        "optim": "sgd",
        "learning_rate": 0.05,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        **more,
    }
    if not versions.STRATEGY.here:  # such a host knows random order and this one
        settings["group_by_length"] = settings.pop("train_sampling_strategy") == "group_by_length"
    return TrainingArguments(**settings)


class Sequential:
    """Before `Trainer`: samples in their own order, where the host has no argument for it."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(dataset if dataset is not None else self.train_dataset)


# A run whose optimizer, schedule, order and evaluations all have a state of their own.
STATEFUL: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "train_sampling_strategy": "random",
    "eval_strategy": "steps",
    "eval_steps": 2,
}


class Spy(TrainerCallback):
    """Keeps what an update is made of, just before the optimizer's step and after it."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.norms: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.gradients.append(found)
        self.norms.append(float(torch.nn.utils.get_total_norm(found.values())) if found else 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({n: t.clone() for n, t in model.state_dict().items()})


def trainer_for(
    head: str,
    folder: Path | str,
    size: int,
    *,
    options: dict[str, Any] | None = None,
    plug: bool = True,
    batch: Any = None,
    model: Any = None,
    kind: type[Trainer] = Trainer,
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Trainer, Spy]:
    """A trainer of `head` on `size` uneven rows, with the plug and a spy."""
    spy = Spy()
    if not versions.STRATEGY.here and more.get("train_sampling_strategy", "sequential") == "sequential":
        kind = type(kind.__name__, (Sequential, kind), {})
    rows = batch if isinstance(batch, torch.utils.data.Dataset) else Rows(batch or batch_for(head, size, uneven=True))
    trainer = kind(
        model=model if model is not None else model_for(head),
        args=arguments(folder, **more),
        train_dataset=rows,
        callbacks=[*([AccelCallback(**(options or {}))] if plug else []), spy],
        **{"eval_dataset": rows, **(extra or {})},
    )
    return trainer, spy


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


ROUNDS = "round(" in inspect.getsource(Trainer._maybe_log_save_evaluate)  # hosts of before 5.0 log four digits
LOGGED = 5.1e-5 if ROUNDS else 0.0
"""What a logged loss may be off, absolute."""


def report(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "accel_report.json").read_text())
