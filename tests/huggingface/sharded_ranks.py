"""What two ranks run of a Trainer with FSDP2, see `tests/processes.py`.

Accelerate takes FSDP up on an accelerator only. On the CPU its distributed type is put in place by hand; all that
follows from it (which modules are sharded, how gradients are held back, how checkpoints are written) is the host's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from plugins.core.system.sharding import whole
from plugins.hf import AccelCallback
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.runs import STATEFUL, losses, trainer_for

HEADS = ("bert-token", "gpt2-causal", "vit-image", "llama-causal")
LAYERS = {"bert": "BertLayer", "gpt2": "GPT2Block", "vit": "ViTLayer", "llama": "LlamaDecoderLayer"}
"""Named, because accelerate 1.15 shards BERT's embeddings twice by itself, and torch refuses that."""
SIZE = 12  # samples an update: 2 ranks x 2 x 3
TAIL = 7  # of an evaluation: a whole step, and one of a single sample, which the host completes with five seen before
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "per_device_eval_batch_size": 3}
CLIP = 0.5
RESUMED = [("FULL_STATE_DICT", "off"), ("FULL_STATE_DICT", 0.9), ("SHARDED_STATE_DICT", 0.9)]


def on_the_cpu() -> None:
    """The distributed type that accelerate gives an accelerator."""
    original = accelerate.state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    accelerate.state.AcceleratorState.__init__ = init


class Whole(TrainerCallback):
    """Gradients and weights, gathered: before the optimizer's step, and after it."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.sharded = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.sharded = sum(isinstance(p, DTensor) for p in model.parameters())
        self.gradients.append({n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({n: whole(p.detach()).clone() for n, p in model.named_parameters()})


def sharded(head: str, folder: Path, size: int = SIZE, form: str = "FULL_STATE_DICT", **more: Any) -> tuple[Any, Whole]:
    """A trainer that shards its model, and writes it in this form."""
    accelerate.state.AcceleratorState._reset_state()
    spy = Whole()
    layers = [LAYERS[head.split("-")[0]]]
    fsdp = {"version": 2, "state_dict_type": form, "transformer_layer_cls_to_wrap": layers}
    trainer, _ = trainer_for(head, folder, size, **{"fsdp": True, "fsdp_config": fsdp, **SPLIT, **more})
    trainer.pop_callback(trainer.callback_handler.callbacks[-1])
    trainer.add_callback(spy)
    return trainer, spy


def facts(trainer: Any) -> dict[str, Any]:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, AccelCallback)).report


def exact(folder: Path) -> dict[str, Any]:
    """Every head: gradients, logged loss and norm of one clipped update of six unequal micro-batches; its weights."""
    found: dict[str, Any] = {}
    for head in HEADS:
        trainer, spy = sharded(head, folder / head, options={"batchnorm": "freeze"}, max_steps=1, max_grad_norm=CLIP)
        trainer.train()
        found[head] = {
            "gradients": spy.gradients[0],
            "weights": spy.weights[0],
            "sharded": spy.sharded,
            "loss": losses(trainer)[0],
            "norm": next(e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e),
            "window": facts(trainer)["window"],
            "evaluation": trainer.evaluate()["eval_loss"],
            "tail": trainer.evaluate(Rows(batch_for(head, TAIL, uneven=True)))["eval_loss"],
        }
    return found


def skipped(folder: Path) -> dict[str, Any]:
    """Three updates; one sample of the second, so that of one rank, is infinite."""
    batch = batch_for("vit-image", 3 * SIZE)
    batch["pixel_values"][SIZE + 1] = float("inf")
    trainer, spy = sharded("vit-image", folder, batch=Rows(batch), options={"ema": 0.5}, max_steps=3)
    trainer.train()
    moved = [
        any(not torch.equal(before[name], after[name]) for name in after)
        for before, after in zip(spy.weights, spy.weights[1:], strict=False)
    ]
    return {"moved": moved, "report": facts(trainer)}


def with_dropout() -> Any:
    model = model_for("bert-token")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def resumed(folder: Path) -> dict[str, Any]:
    """By form of the host's files and average: weights of a straight run, and of one from its second checkpoint."""
    found: dict[str, Any] = {}
    for form, average in RESUMED:
        runs = []
        for name, start in (("straight", None), ("again", folder / f"{form}-{average}-straight" / "checkpoint-2")):
            trainer, spy = sharded(
                "bert-token", folder / f"{form}-{average}-{name}", 3 * SIZE, form=form, model=with_dropout(),
                options={"ema": average}, **STATEFUL, num_train_epochs=1, save_strategy="steps", save_steps=1,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=str(start) if start else None)
            runs.append(
                {
                    "weights": spy.weights[-1],
                    "end": {n: whole(p.detach()).clone() for n, p in trainer.model.named_parameters()},
                    "losses": losses(trainer),
                    "evaluations": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
                    "folder": trainer.args.output_dir,
                }
            )
        found[f"{form}-{average}"] = runs
    return found


def compiled(folder: Path) -> dict[str, Any]:
    """Blocks compiled inside of their shards."""
    trainer, spy = sharded("bert-token", folder, options={"compile": "on", "compile_backend": "aot_eager"}, max_steps=2)
    trainer.train()
    return {"gradients": spy.gradients[0], "report": facts(trainer)["compile"]}


def by_launcher(folder: Path) -> dict[str, Any]:
    """The environment that `accelerate launch` makes of its config, and nothing in the arguments."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
                      FSDP_TRANSFORMER_CLS_TO_WRAP=LAYERS["bert"],
                      FSDP_RESHARD_AFTER_FORWARD="true", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")  # fmt: skip
    trainer, spy = sharded("bert-token", folder, max_steps=1, fsdp=None, fsdp_config=None)
    trainer.train()
    return {"gradients": spy.gradients[0], "sharded": spy.sharded}


def main(rank: int, folder: str, *names: str) -> None:
    on_the_cpu()
    found = {name: globals()[name](Path(folder) / name) for name in names}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    assert dist.get_world_size() == 2
