"""What two ranks run under `torchrun --nproc_per_node=2`; rank 0 writes what it found to the file named first."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from plugins.hf import AccelCallback
from tests.huggingface.heads import HEADS, batch_for
from tests.huggingface.runs import losses, trainer_for
from tests.huggingface.text import TokenRows, pad, unpadded

SPLITS = ((5, 1), (3, 2), (1, 5))
"""Samples a micro-batch, micro-batches an update."""


def gradients(folder: Path) -> dict[str, Any]:
    """Every head and split: the gradient of one update, the logged loss, eval_loss before and the all-reduces."""
    found: dict[str, Any] = {}
    for head in HEADS:
        for micro, accumulate in SPLITS:
            trainer, spy = trainer_for(
                head,
                folder,
                2 * micro * accumulate,
                options={"batchnorm": "freeze"},
                per_device_train_batch_size=micro,
                per_device_eval_batch_size=3,
                gradient_accumulation_steps=accumulate,
                max_steps=1,
            )
            evaluation = trainer.evaluate()["eval_loss"] if accumulate == 2 else None
            trainer.train()
            found[f"{head} {micro}x{accumulate}"] = {
                "gradients": spy.gradients[0],
                "loss": losses(trainer)[0],
                "eval_loss": evaluation,
            }
    return found


def counting_reductions(trainer: Trainer) -> list[int]:
    """One entry a bucket of gradients that DistributedDataParallel reduces in the run to come."""
    calls: list[int] = []

    def hook(state, bucket):  # torch checks annotations here, and these are strings in this file
        calls.append(1)
        return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(None, bucket)

    original = trainer._prepare_for_training

    def prepared(*args: Any, **kwargs: Any) -> Any:
        model, loader = original(*args, **kwargs)
        model.register_comm_hook(None, hook)
        return model, loader

    trainer._prepare_for_training = prepared
    return calls


def apart(weights: dict[str, torch.Tensor]) -> float:
    """The largest difference between the two ranks' weights."""
    flat = torch.cat([t.flatten().float() for t in weights.values()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return float((both[0] - both[1]).abs().max())


def in_step(folder: Path) -> dict[str, Any]:
    """`evaluate()` first, then three updates of four micro-batches: reductions an update, and the ranks' distance."""
    trainer, spy = trainer_for(
        "bert-token",
        folder,
        24,
        options={"ema": 0.5},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=3,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.evaluate()
    calls = counting_reductions(trainer)
    trainer.train()
    left = sorted(path.name for path in folder.iterdir())
    return {"reductions": len(calls), "apart": apart(spy.weights[-1]), "files": left}


def compiled(folder: Path) -> dict[str, Any]:
    """Compiled in place inside of DistributedDataParallel, by scope: three updates of four micro-batches."""
    found: dict[str, Any] = {}
    for scope in ("whole", "regional"):
        torch._dynamo.reset()
        trainer, spy = trainer_for(
            "bert-token",
            folder / scope,
            8,
            options={"compile": "on", "compile_backend": "aot_eager", "compile_scope": scope},
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_steps=3,
        )
        calls = counting_reductions(trainer)
        trainer.train()
        found[scope] = {
            "gradients": spy.gradients[0],
            "reductions": len(calls),
            "apart": apart(spy.weights[-1]),
            "report": next(c for c in trainer.callback_handler.callbacks if isinstance(c, AccelCallback)).report[
                "compile"
            ],
        }
    return found


def buckets(folder: Path) -> dict[str, Any]:
    """Shapes that each rank sees a step, and the gradient of an epoch in one update with a ragged tail."""
    rows = unpadded(batch_for("bert-token", 23, uneven=True))
    trainer, spy = trainer_for(
        "bert-token",
        folder,
        23,
        options={"buckets": [4, 8, 12]},
        batch=TokenRows(rows),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=6,
        max_steps=1,
        train_sampling_strategy="random",
        extra={"data_collator": pad, "compute_metrics": lambda p: {"rows": len(p.predictions)}},
    )
    shapes: list[Any] = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *a: (
        shapes.append(list(inputs["input_ids"].shape)),
        step(model, inputs, *a),
    )[1]  # type: ignore[func-returns-value]
    evaluation = trainer.evaluate()
    trainer.train()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, shapes)
    return {"shapes": every, "gradients": spy.gradients[0], "loss": losses(trainer)[0], "eval": evaluation}


class Gathers(Trainer):
    """Gathers a metric over the ranks inside of its loss, and counts its calls, as TRL's SFTTrainer does."""

    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.calls += 1
        self.accelerator.gather_for_metrics((inputs["labels"] != -100).sum())
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def gathering(folder: Path) -> dict[str, Any]:
    """Two updates of three micro-batches of one sample, each rank's own: calls, the gradient, and `eval_loss`."""
    trainer, spy = trainer_for(
        "bert-token",
        folder,
        12,
        kind=Gathers,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=3,
        max_steps=2,
        train_sampling_strategy="sequential",
        options={"buckets": "off"},
    )
    trainer.train()
    calls = trainer.calls
    return {
        "calls": calls,
        "gradients": spy.gradients[0],
        "apart": apart(spy.weights[-1]),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": spy.weights[-1],
    }


class PassesOn(Trainer):
    """The form that a user's loss most often has."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)


def mean_of_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function that leaves the host's count aside."""
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def passed_on(folder: Path) -> dict[str, Any]:
    """Two losses of a user's, which the host multiplies by the ranks: the gradient of one update, and `eval_loss`."""
    found: dict[str, Any] = {}
    for name, kind, extra in (
        ("method", PassesOn, {}),
        ("function", Trainer, {"compute_loss_func": mean_of_tokens}),
    ):
        trainer, spy = trainer_for(
            "bert-token",
            folder,
            8,
            kind=kind,
            extra=extra,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=1,
            options={"buckets": "off"},
        )
        evaluation = trainer.evaluate()["eval_loss"]
        trainer.train()
        found[name] = {"gradients": spy.gradients[0], "loss": losses(trainer)[0], "eval_loss": evaluation}
    return found


def main() -> None:
    target, names = Path(sys.argv[1]), sys.argv[2:]
    found = {name: globals()[name](target.parent / name) for name in names}
    if dist.get_rank() == 0:
        torch.save(found, target)
    dist.barrier()
    # gloo's threads let go of Python objects after the last collective: an interpreter that finalises meanwhile aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
