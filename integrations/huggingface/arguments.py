"""TrainingArguments and settings together: contradictions, named with the way out, and what settings change."""

from __future__ import annotations

from typing import Any

from integrations.contract import UnsupportedRun
from integrations.huggingface import sharding
from integrations.huggingface.deepspeed import is_deepspeed
from integrations.huggingface.lengths import most_positions
from integrations.huggingface.patches import Held
from integrations.shared.batch_size import micro_batches_per_update
from integrations.shared.learning_rate import rate_factor


def refuse_contradictions(trainer: Any, config: Any) -> None:
    """Raise UnsupportedRun, one line, where the trainer's own settings and the plug's cannot both hold."""
    args = trainer.args
    accumulate = args.gradient_accumulation_steps
    for field in ("accumulate", "effective_batch"):
        value = getattr(config, field)
        if value != "host" and accumulate > 1 and not (field == "accumulate" and value == accumulate):
            raise UnsupportedRun(
                f"{field}={value}: TrainingArguments sets gradient_accumulation_steps={accumulate} as well; "
                f"leave one of the two out"
            )
    if (compiles := host_compiles(trainer)) and config.compile == "on":
        raise UnsupportedRun(
            f"compile=on: {compiles}, and the model would be compiled twice; "
            "take that away, as by torch_compile=False (the plug compiles in place), or set compile=off"
        )
    sharding.refuse(trainer, config)
    host = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if config.precision not in ("host", "auto", host) and (host != "fp32" or config.precision == "fp16"):
        raise UnsupportedRun(
            f"precision={config.precision}: TrainingArguments trains in {host}; "
            + (f"set {config.precision}=True there" if config.precision != "fp32" else f"set {host}=False there")
            + ", or leave precision=host"
        )
    positions = max(most_positions(trainer.model), default=0)
    if positions and config.buckets not in ("auto", "off") and max(config.buckets) > positions:
        raise UnsupportedRun(
            f"buckets={config.buckets}: {type(trainer.model).__name__} has {positions} positions; "
            f"allowed are edges of at most {positions}"
        )
    if effective_accumulation(trainer, config) != accumulate and is_deepspeed(trainer):
        field = "accumulate" if config.accumulate != "host" else "effective_batch"
        raise UnsupportedRun(
            f"{field}={getattr(config, field)}: DeepSpeed's engine is built with the arguments' own count; set "
            "gradient_accumulation_steps in TrainingArguments"
        )


def host_compiles(trainer: Any) -> str:
    """The setting by which the host itself compiles the model, as a user would write it; empty where it does not."""
    if trainer.args.torch_compile:
        return "torch_compile=True"
    backend = trainer.accelerator.state.dynamo_plugin.backend.value  # also of `accelerate launch --dynamo_backend`
    return "" if backend == "NO" else f"ACCELERATE_DYNAMO_BACKEND={backend.lower()}"


def refuse_late(trainer: Any, config: Any) -> None:
    """Raise UnsupportedRun where a setting would have had to be known before the host planned its updates."""
    for field in ("accumulate", "effective_batch"):
        value = getattr(config, field)
        if value != "host" and effective_accumulation(trainer, config) != trainer.args.gradient_accumulation_steps:
            raise UnsupportedRun(
                f"{field}={value}: the callback was added to a trainer that had been built; pass it in "
                f"Trainer(callbacks=[...]), or set gradient_accumulation_steps in TrainingArguments"
            )


def effective_accumulation(trainer: Any, config: Any) -> int:
    """K, micro-batches an update, from `accumulate`, `effective_batch` or the host.

    Raises:
        UnsupportedRun: the effective batch is not a whole number of micro-batches.
    """
    step = trainer.args.train_batch_size * max(trainer.args.world_size, 1)
    named = f"the {step} samples of one step (per_device_train_batch_size x devices)"
    return micro_batches_per_update(config, step, host=int(trainer.args.gradient_accumulation_steps), named=named)


def apply(trainer: Any, config: Any, patches: Held) -> None:
    """Set what the settings change on the arguments, for one run. `patches` targets `trainer.args`."""
    args = trainer.args
    before, now = args.gradient_accumulation_steps, effective_accumulation(trainer, config)
    if now != before:
        patches.value("gradient_accumulation_steps", now)
        factor = rate_factor(config.lr_scale, now / before)
        if factor != 1.0:
            patches.value("learning_rate", args.learning_rate * factor)


def same_effective_batch(wanted: int, micro_batch: int) -> tuple[int, int]:
    """(micro-batch, K) with `micro_batch * K == wanted`, the micro-batch as large as allowed.

    After running out of memory the host takes 0.9 of the micro-batch and keeps K, so that the effective batch
    shrinks and shapes get odd. The largest divisor keeps it as the user set it.
    """
    size = next(size for size in range(min(micro_batch, wanted), 0, -1) if wanted % size == 0)
    return size, wanted // size
