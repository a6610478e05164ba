"""What of Ultralytics the plug touches, and what it does where a release lacks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from ultralytics.utils import loss as criteria
from ultralytics.utils import torch_utils

from integrations.patches import Patches
from integrations.versions import Symbol

_TRAINER = "ultralytics.engine.trainer:BaseTrainer"
_MEMBERS = (
    "optimizer_step",
    "preprocess_batch",
    "_model_train",
    "_close_dataloader_mosaic",
    "validate",
    "save_model",
    "final_eval",
    "add_callback",
    "accumulate",
    "amp",
    "args",
    "batch_size",
    "best",
    "device",
    "ema",
    "epoch",
    "epochs",
    "last",
    "lf",
    "loss",
    "model",
    "optimizer",
    "resume",
    "save_dir",
    "scaler",
    "scheduler",
    "stop",
    "train_loader",
    "wdir",
)
_EVENTS = (
    "on_pretrain_routine_end",
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_model_save",
    "teardown",
)

PIPELINE = Symbol(f"{_TRAINER}._build_train_pipeline", "8.4.60", "such a host halves no batch for lack of memory")
NAN_RECOVERY = Symbol(f"{_TRAINER}._handle_nan_recovery", "8.4.0", "the host has no recovery that could undo updates")
WARMUP = Symbol(f"{_TRAINER}._get_warmup_iterations", "8.4.140", "its rule is written out: at least 100 micro-batches")
LOSS_METHOD = Symbol(
    "ultralytics.utils.loss:v8DetectionLoss.loss", "8.4.0", "the criterion's call is held where its owner keeps it"
)
TERM_NAMES = Symbol(
    "ultralytics.utils.loss:v8DetectionLoss.loss_names", "8.4.140", "terms are named by the criterion's class"
)
GROUP_NAMES = Symbol(
    f"{_TRAINER}.build_optimizer(muon)", "8.4.60", "parameter groups are known by their decay and order"
)
DISTILLATION = Symbol("ultralytics.nn.distill_model:DistillationModel", "8.4.100", "there is nothing to refuse")
UNWRAP = Symbol("ultralytics.utils.torch_utils:unwrap_model", "8.3.200", "de_parallel does the same")
TABLE = (
    *(Symbol(f"{_TRAINER}.{name}") for name in _MEMBERS),
    *(Symbol(f"ultralytics.utils.callbacks.base:default_callbacks[{name}]") for name in _EVENTS),
    Symbol("ultralytics.engine.trainer:strip_optimizer(updates)"),
    Symbol("ultralytics.engine.model:Model.callbacks"),
    Symbol("ultralytics.cfg:entrypoint"),
    Symbol("ultralytics.cfg:merge_equals_args"),
    Symbol("ultralytics.nn.tasks:YOLOEModel"),
    Symbol("ultralytics.nn.tasks:BaseModel.loss"),
    Symbol("ultralytics.nn.tasks:DetectionModel.init_criterion"),
    Symbol("ultralytics.utils:RANK"),
    Symbol("ultralytics.utils:LOGGER"),
    Symbol("ultralytics.utils.loss:v8DetectionLoss.assigner"),
    Symbol("ultralytics.utils.loss:v8ClassificationLoss"),
    Symbol("ultralytics.utils.loss:v8OBBLoss"),
    Symbol("ultralytics.models.utils.loss:RTDETRDetectionLoss"),
    Symbol("ultralytics.data.build:InfiniteDataLoader.reset"),
    Symbol("ultralytics.data.build:InfiniteDataLoader._get_iterator"),
    Symbol("ultralytics.utils.torch_utils:ModelEMA.update"),
    Symbol("ultralytics.utils.torch_utils:ModelEMA.updates"),
    Symbol("ultralytics.utils.torch_utils:ModelEMA.decay"),
    PIPELINE,
    NAN_RECOVERY,
    WARMUP,
    LOSS_METHOD,
    TERM_NAMES,
    GROUP_NAMES,
    DISTILLATION,
    UNWRAP,
)

_TERMS = {  # of criteria that do not name them, in the order of their vector
    "v8SegmentationLoss": ("box_loss", "seg_loss", "cls_loss", "dfl_loss"),
    "v8PoseLoss": ("box_loss", "pose_loss", "kobj_loss", "cls_loss", "dfl_loss"),
}


def unwrap(model: nn.Module) -> Any:
    """The model inside the host's wrapper of several ranks."""
    return getattr(torch_utils, "unwrap_model" if UNWRAP.here else "de_parallel")(model)


def distils(model: nn.Module) -> bool:
    """Whether this is the host's pair of a student and a teacher."""
    if not DISTILLATION.here:
        return False
    from ultralytics.nn.distill_model import DistillationModel

    return isinstance(unwrap(model), DistillationModel)


def warmup_iterations(trainer: Any, batches: float) -> float:
    """Micro-batches (or updates, with `batches` an epoch in them) of the host's warm-up; 0 without one."""
    if WARMUP.here:
        return float(trainer._get_warmup_iterations(batches))
    epochs = trainer.args.warmup_epochs
    return max(round(epochs * batches), 100) if epochs > 0 else 0


def top_of_ramp(trainer: Any, nominal: int) -> float:
    """Micro-batches an update at the end of the host's warm-up; an older host ramps to the unrounded number."""
    return nominal if WARMUP.here else trainer.args.nbs / trainer.batch_size


def decays(group: dict[str, Any], host_decay: float) -> bool:
    """Whether the host's rule for the weight decay is for this parameter group.

    By its name. Without one, a user has built the optimizer, and the rule is for those groups that took over the decay
    which the host gave for it, `host_decay`; an older host names none, and its rule is for those that decay.
    """
    if "param_group" in group:
        return group["param_group"] in {"weight", "muon"}
    decay = group.get("weight_decay", 0.0)  # not every optimizer has one
    return bool(decay) and (not GROUP_NAMES.here or math.isclose(decay, host_decay))


def warms_up_as_bias(trainer: Any, group: dict[str, Any]) -> bool:
    """Whether its rate begins at `warmup_bias_lr`; an older host, without names, does so with its first group."""
    if "param_group" in group or GROUP_NAMES.here:
        return bool(group.get("param_group") == "bias")
    return group is trainer.optimizer.param_groups[0]


def term_names(criterion: Any) -> tuple[str, ...]:
    """Of a detection criterion's vector of terms."""
    if hasattr(criterion, "loss_names"):
        return tuple(criterion.loss_names)
    return _TERMS.get(type(criterion).__name__, ("box_loss", "cls_loss", "dfl_loss"))


def hold_loss(patches: Patches, owner: Any, name: str, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Put `loss(preds, batch)` in the place of the criterion at `owner.name`; returns what it was."""
    criterion = getattr(owner, name)
    if hasattr(criteria.v8DetectionLoss, "loss"):
        return patches.put(criterion, "loss", loss)
    return patches.put(owner, name, loss)


def read_yaml(path: Path) -> dict[str, Any]:
    """Of a file that the host wrote."""
    found = yaml.safe_load(path.read_text(encoding="utf-8", errors="ignore"))
    return found if isinstance(found, dict) else {}
