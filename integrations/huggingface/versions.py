"""What of transformers, accelerate and datasets the plug touches, and what it does where a release lacks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from integrations.huggingface.frames import caller_local
from integrations.huggingface.patches import Held
from integrations.versions import Symbol

_TRAINER = "transformers.trainer:Trainer"
_EVENTS = ("on_init_end", "on_train_begin", "on_epoch_begin", "on_pre_optimizer_step", "on_optimizer_step")
_METHODS = (
    "train",
    "_inner_training_loop",
    "_get_dataloader",
    "evaluation_loop",
    "compute_loss",
    "training_step",
    "get_batch_samples",
    "prediction_step",
    "save_model",
    "_save_checkpoint",
    "compute_loss_context_manager",
    "get_train_dataloader",
    "_get_train_sampler",
    "_get_eval_sampler",
    "_get_output_dir",
    "_push_from_checkpoint",
    "_prepare_inputs",
    "_remove_unused_columns",
    "_get_collator_with_removed_columns",
    "_train_batch_size",
    "accelerator",
    "callback_handler",
    "compute_loss_func",
    "data_collator",
    "is_in_train",
    "label_smoother",
    "model_accepts_loss_kwargs",
    "model_wrapped",
    "optimizer",
    "processing_class",
    "state",
)

RUN_EPOCH = Symbol(
    f"{_TRAINER}._run_epoch",
    "5.10",
    "a callback added to a trainer that was built gets its buckets from the next train() on",
)
GRAD_NORM = Symbol(
    f"{_TRAINER}._get_grad_norm", "5.10", "gradients are put right where the host clips, or else just before its step"
)
COUNT = Symbol(
    f"{_TRAINER}._get_num_items_in_batch", "4.57", "a window is counted after the host has fetched and counted it"
)
SCALED = Symbol(f"{_TRAINER}.loss_is_scaled_for_ga", "5.20", "a user cannot say that a loss is divided; it is seen")
WINDOW = Symbol(
    f"{_TRAINER}.current_gradient_accumulation_steps",
    "5.0",
    "the loss is divided by its argument, which is held instead",
)
ROTATE = Symbol("transformers.trainer_utils:rotate_checkpoints", "5.10", "Trainer._rotate_checkpoints is asked")
STRATEGY = Symbol(
    "transformers.training_args:TrainingArguments.train_sampling_strategy",
    "5.10",
    "the host's group_by_length is read instead",
)
WORKERS = Symbol(
    "transformers.training_args:TrainingArguments.dataloader_multiprocessing_context",
    "5.15",
    "workers start as the platform does it",
)
BOUNDARY = Symbol(
    "accelerate.utils.deepspeed:DeepSpeedEngineWrapper.backward(sync_gradients)",
    "1.10",
    "DeepSpeed is refused: its engine would count micro-batches across the end of an epoch",
)
TABLE = (
    *(Symbol(f"{_TRAINER}.{name}") for name in _METHODS),
    *(Symbol(f"transformers.trainer_callback:TrainerCallback.{name}") for name in (*_EVENTS, "on_step_end")),
    Symbol("transformers.trainer_callback:TrainerCallback.on_train_end"),
    Symbol(f"{_TRAINER}._inner_training_loop(resume_from_checkpoint)"),
    Symbol(f"{_TRAINER}._inner_training_loop(train_dataloader)"),
    Symbol("transformers.trainer_utils:seed_worker"),
    Symbol("transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Symbol("accelerate.utils:gather_object"),
    Symbol("accelerate.utils:send_to_device"),
    Symbol("accelerate:Accelerator.clip_grad_norm_"),
    Symbol("accelerate:Accelerator.unscale_gradients"),
    Symbol("accelerate:Accelerator.scaler"),
    Symbol("accelerate.optimizer:AcceleratedOptimizer.step_was_skipped"),
    Symbol("accelerate.optimizer:AcceleratedOptimizer._is_overflow"),
    Symbol("accelerate.state:AcceleratorState.deepspeed_plugin"),
    Symbol("accelerate.utils.deepspeed:HfDeepSpeedConfig.get_value"),
    Symbol("datasets:Dataset.column_names"),
    RUN_EPOCH,
    GRAD_NORM,
    COUNT,
    SCALED,
    WINDOW,
    ROTATE,
    STRATEGY,
    WORKERS,
    BOUNDARY,
)
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
DEEPSPEED = (
    *(Symbol(f"{_ENGINE}.{name}") for name in ("gradient_clipping", "was_step_applied", "get_global_grad_norm")),
    *(Symbol(f"{_ZERO}.{name}") for name in ("clip_grad", "loss_scale")),
    Symbol(f"{_ZERO}.compute_grad_norm", "0.19.8", "the norm is always taken"),
    Symbol(f"{_ZERO}.check_grad_overflow", "0.19.8", "refused but in fp16: nothing else is checked"),
)
"""Of an engine that most installations lack: only its own test asks for these."""


def hold_gradients(patches: Held, on_accelerator: Held, clip: Callable[..., Any], norm: Callable[..., Any]) -> None:
    """Once a window, after the last backward, the host asks both: `clip` where it clips, then `norm(model, grad_norm)`.

    A host of before `_get_grad_norm` asks accelerate, and only where it clips.
    """
    if GRAD_NORM.here:
        patches.method("_clip_grad_norm", clip)
        patches.method("_get_grad_norm", norm)
    else:
        on_accelerator.method("clip_grad_norm_", clip)


def hold_fetching(patches: Held, fetch: Callable[..., Any], count: Callable[..., Any]) -> None:
    """`fetch(original, ...)` is around a window's fetching, where `count(original, batches, device)` is asked.

    A host of before `_get_num_items_in_batch` counts while it fetches, and its count is what the original gives.
    """
    if COUNT.here:
        patches.method("get_batch_samples", fetch)
        return

    def fetched_and_counted(original: Callable[..., Any], iterator: Any, number: int, device: Any = None) -> Any:
        batches, items = fetch(original, iterator, number, device)
        return batches, count(lambda *_: items, batches, device)

    patches.method("get_batch_samples", fetched_and_counted)


class Closing(int):
    """Micro-batches an update, that also ends a window at the host's micro-batch number `last`, counted from 1."""

    last = 0

    def __rmod__(self, number: int) -> int:
        """The host ends a window where `number % self` is 0."""
        return 0 if number == self.last else number % int(self)


def hold_tail(trainer: Any, arguments: Held, fetched: int) -> None:
    """Let the host end the window of the `fetched` micro-batches at hand, where it is the tail of a resumed epoch.

    A host of before 4.57 counts the micro-batches of such an epoch from where it resumes, and compares them with all of
    the epoch: the update of a partial last window would be lost. What is held on `arguments` is undone by the caller
    before anything is saved.
    """

    def of_loop(name: str) -> int:
        return int(caller_local(trainer, "_inner_training_loop", name) or 0)

    size = int(trainer.args.gradient_accumulation_steps)
    if not 0 < fetched < size:
        return  # the loop's frame is asked for a tail alone: asking keeps alive what it holds
    skipped, last = of_loop("steps_skipped"), of_loop("step")
    if not skipped or last + 1 + fetched + skipped != of_loop("steps_in_epoch"):
        return
    closing = Closing(size)
    closing.last = last + 1 + fetched
    arguments.value("gradient_accumulation_steps", closing)


def hold_order(trainer: Any) -> list[Held]:
    """Let the rest of a resumed epoch have that epoch's order; returns what is held, for the caller to undo.

    An older host takes a loader of its own there, which counts its epochs from 0 and tells the sampler so.
    """
    if not caller_local(trainer, "_inner_training_loop", "steps_trained_in_current_epoch"):
        return []
    loader, epoch = trainer.callback_handler.train_dataloader, epoch_at_hand(trainer)
    owners = getattr(getattr(loader, "batch_sampler", None), "sampler", None), getattr(loader, "dataset", None)
    held = [Held(owner) for owner in owners if hasattr(owner, "set_epoch")]
    for one in held:
        one.method("set_epoch", lambda original, number: original(max(number, epoch)))
    return held


def rotate(trainer: Any, run: Path) -> None:
    """Remove the checkpoints over the host's `save_total_limit`."""
    if not ROTATE.here:
        trainer._rotate_checkpoints(use_mtime=True, output_dir=str(run))
        return
    from transformers.trainer_utils import rotate_checkpoints

    rotate_checkpoints(
        output_dir=str(run),
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


def chosen_order(args: Any) -> str:
    """The user's argument for the order of samples; empty where it is the host's own random one."""
    if not STRATEGY.here:
        return "group_by_length=True" if args.group_by_length else ""
    strategy = str(args.train_sampling_strategy).removeprefix("SamplingStrategy.").lower()
    return "" if strategy == "random" else f"train_sampling_strategy={strategy}"


def epoch_at_hand(trainer: Any) -> int:
    """Of a host that has no `_run_epoch`: the epoch that its loop has just begun."""
    return int(caller_local(trainer, "_inner_training_loop", "epoch") or 0)
