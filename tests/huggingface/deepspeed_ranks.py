"""What two ranks run of a Trainer with DeepSpeed, see `tests/processes.py`.

DeepSpeed's start on a CPU compiles a collective in C++, which takes minutes; without it, gloo's are taken.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed.ops
import torch
import torch.distributed as dist
from transformers import Trainer

from plugins.errors import AccelError
from plugins.hf import AccelCallback
from tests.huggingface.heads import Rows, batch_for
from tests.huggingface.runs import STATEFUL, losses, trainer_for
from tests.huggingface.sharded_ranks import with_dropout
from tests.huggingface.text import TokenRows, pad, unpadded

HEADS = ("bert-token", "gpt2-causal", "vit-image")
STAGES = (1, 2)
MICRO = 2
ROWS = 20
"""Of an epoch: a window of 2 ranks x 2 x 3, and one of 2 ranks x 2 x 2."""
SPLIT = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": 3, "per_device_eval_batch_size": 3}
CLIP, DECAY, RATE = 0.5, 0.5, 0.05
RESUMED = [(1, "off"), (1, 0.9), (2, 0.9)]
ENVIRONMENT = {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
"""accelerate lets go of DeepSpeed where it is told of a CPU; the Trainer is told instead."""
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")


def engine(stage: int, **more: Any) -> dict[str, Any]:
    """DeepSpeed's config, as much of it as the host fills in."""
    return {"zero_optimization": {"stage": stage}, **dict.fromkeys(AUTO, "auto"), **more}


def trained_by(stage: int, head: str, folder: Path, config: dict[str, Any] | None = None, **more: Any) -> Any:
    return trainer_for(head, folder, ROWS, deepspeed=engine(stage, **(config or {})), **{**SPLIT, **more})


def facts(trainer: Any) -> dict[str, Any]:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, AccelCallback)).report


def end(trainer: Any) -> dict[str, torch.Tensor]:
    """What the model holds after its training."""
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def norms(trainer: Any) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def exact(folder: Path) -> dict[str, Any]:
    """Every head and stage: two epochs of a whole window and a tail, clipped, with an average."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        for head in HEADS:
            trainer, spy = trained_by(
                stage, head, folder / f"{head}-{stage}", options={"ema": DECAY}, num_train_epochs=2, max_grad_norm=CLIP
            )
            trainer.train()
            found[f"{head}-{stage}"] = {
                "weights": spy.weights[-1],
                "average": end(trainer),
                "losses": losses(trainer),
                "norms": norms(trainer),
                "report": facts(trainer),
                "evaluation": trainer.evaluate()["eval_loss"],
            }
    return found


def by_config(folder: Path) -> dict[str, Any]:
    """With the optimizer of DeepSpeed's config, which the engine makes."""
    config = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}, "zero_allow_untested_optimizer": True}
    trainer, spy = trained_by(2, "bert-token", folder, config, num_train_epochs=2)
    trainer.train()
    return {"weights": spy.weights[-1], "engine": type(trainer.model_wrapped).__name__}


def by_launcher(folder: Path) -> dict[str, Any]:
    """The environment that `accelerate launch` makes of its config, and nothing in the arguments."""
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    os.environ.update(launched, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3")
    try:
        trainer, spy = trainer_for("bert-token", folder, ROWS, **SPLIT, num_train_epochs=2)
        trainer.train()
    finally:
        for name in launched:
            del os.environ[name]
    return {"weights": spy.weights[-1], "engine": type(trainer.model_wrapped).__name__}


class OwnLoss(Trainer):
    """A mean over the labels of a micro-batch, as a user writes it: no count is taken."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


def own_loss(folder: Path) -> dict[str, Any]:
    """A user's loss, which is watched."""
    trainer, spy = trained_by(2, "bert-token", folder, kind=OwnLoss, num_train_epochs=2)
    trainer.train()
    return {"weights": spy.weights[-1], "report": facts(trainer)}


def limited(folder: Path) -> dict[str, Any]:
    """By setting of the plug and of DeepSpeed's config: weights after a clipped update, and what of it is left."""
    found: dict[str, Any] = {}
    for name, setting, host in (("plug", CLIP, 0.0), ("off", "off", CLIP)):
        trainer, spy = trained_by(
            1, "bert-token", folder / name, options={"clip_norm": setting}, num_train_epochs=1, max_grad_norm=host
        )
        trainer.train()
        left = trainer.model_wrapped.optimizer.clip_grad
        found[name] = {"weights": spy.weights[-1], "left": left, "report": facts(trainer)}
    return found


def skipped(folder: Path) -> dict[str, Any]:
    """Three updates; a sample of the second, so that of one rank, is infinite. In bf16 DeepSpeed is not to look."""
    found: dict[str, Any] = {}
    for name, config, options in (
        ("fp32", {}, {}),
        ("bf16", {"bf16": {"enabled": True, "check_grad_overflow": False}}, {}),
        ("stop", {}, {"nonfinite": "stop"}),
    ):
        batch = batch_for("vit-image", 36)
        batch["pixel_values"][13] = float("inf")
        trainer, spy = trained_by(
            2, "vit-image", folder / name, config, batch=Rows(batch), options={"ema": DECAY, **options}, max_steps=3,
            bf16=name == "bf16",
        )  # fmt: skip
        refused = ""
        try:
            trainer.train()
        except AccelError as error:
            refused = str(error)
        moved = [
            any(not torch.equal(before[name], after[name]) for name in after)
            for before, after in zip(spy.weights, spy.weights[1:], strict=False)
        ]
        finite = all(bool(value.isfinite().all()) for value in end(trainer).values())
        found[name] = {"moved": moved, "refused": refused, "finite": finite, "report": facts(trainer)}
    return found


def scaled(folder: Path) -> dict[str, Any]:
    """In fp16 the engine multiplies the loss, by more than the batch has targets."""
    config = {"fp16": {"enabled": True, "loss_scale": 256}}
    trainer, spy = trained_by(1, "bert-token", folder, config, num_train_epochs=1, fp16=True)
    trainer.train()
    return {"weights": spy.weights[-1], "report": facts(trainer)}


def buckets(folder: Path) -> dict[str, Any]:
    """Shapes that each rank sees a step, and the weights after an epoch in one update with a ragged tail."""
    rows = unpadded(batch_for("bert-token", 23, uneven=True))
    trainer, spy = trained_by(
        2, "bert-token", folder, batch=TokenRows(rows), options={"buckets": [4, 8, 12]}, max_steps=1,
        gradient_accumulation_steps=6, train_sampling_strategy="random", extra={"data_collator": pad},
    )  # fmt: skip
    shapes: list[Any] = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *a: (
        shapes.append(list(inputs["input_ids"].shape)),
        step(model, inputs, *a),
    )[1]  # type: ignore[func-returns-value]
    trainer.train()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, shapes)
    return {"shapes": every, "weights": spy.weights[-1]}


def compiled(folder: Path) -> dict[str, Any]:
    """Blocks compiled in place inside of the engine."""
    options = {"compile": "on", "compile_backend": "aot_eager", "compile_scope": "regional"}
    trainer, spy = trained_by(2, "bert-token", folder, options=options, num_train_epochs=1)
    trainer.train()
    return {"weights": spy.weights[-1], "report": facts(trainer)["compile"]}


def checkpointed(folder: Path) -> dict[str, Any]:
    """Activations of the blocks are computed again in the backward."""
    trainer, spy = trained_by(2, "bert-token", folder, options={"checkpointing": "on"}, num_train_epochs=1)
    trainer.train()
    return {"weights": spy.weights[-1], "report": facts(trainer)["memory"]}


def twice(folder: Path) -> dict[str, Any]:
    """Two runs of one trainer, the second from the first's checkpoint; the best of them is loaded at the end."""
    trainer, _ = trained_by(
        1, "bert-token", folder, options={"ema": DECAY}, num_train_epochs=2, save_strategy="epoch",
        eval_strategy="epoch", load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    first = end(trainer)
    trainer.train(resume_from_checkpoint=True)
    return {"first": first, "second": end(trainer), "best": trainer.state.best_model_checkpoint}


def resumed(folder: Path) -> dict[str, Any]:
    """By stage and average: a straight run with dropout, and one from its second checkpoint."""
    found: dict[str, Any] = {}
    for stage, average in RESUMED:
        runs = []
        for name, start in (("straight", None), ("again", folder / f"{stage}-{average}-straight" / "checkpoint-2")):
            trainer, spy = trained_by(
                stage, "bert-token", folder / f"{stage}-{average}-{name}", model=with_dropout(),
                options={"ema": average}, **STATEFUL, num_train_epochs=2, save_strategy="steps", save_steps=1,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=str(start) if start else None)
            runs.append(
                {
                    "weights": spy.weights[-1],
                    "end": end(trainer),
                    "losses": losses(trainer),
                    "evaluations": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
                    "folder": trainer.args.output_dir,
                }
            )
        found[f"{stage}-{average}"] = runs
    return found


def main(rank: int, folder: str, *names: str) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {name: globals()[name](Path(folder) / name) for name in names}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
