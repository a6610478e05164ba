"""A Trainer whose model is sharded over ranks: which ways are served, and what its checkpoints then need."""

from __future__ import annotations

from typing import Any

from integrations.contract import UnsupportedRun
from integrations.huggingface import deepspeed


def is_sharded(trainer: Any) -> bool:
    """Whether accelerate shards the model (FSDP)."""
    return bool(trainer.is_fsdp_enabled)


def refuse(trainer: Any, config: Any) -> None:
    """Raise UnsupportedRun, one line, for an engine that is not served, or a setting that shards cannot have."""
    if deepspeed.is_deepspeed(trainer):
        deepspeed.refuse(trainer, config)
    if trainer.is_fsdp_enabled:
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        if version != 2:
            raise UnsupportedRun(
                f"fsdp version {version}: not supported by the plug; set fsdp_config={{'version': 2}} in "
                "TrainingArguments, or fsdp_version: 2 in accelerate's config"
            )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise UnsupportedRun(
            "distributed_config: a model that was sharded as it was loaded is not supported by the plug; load it whole "
            "and set fsdp=True"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("tp", "cp", "sp"):
        if getattr(parallel, f"{kind}_enabled", False):
            raise UnsupportedRun(
                f"parallelism_config: {kind}_size={getattr(parallel, f'{kind}_size')}: not supported by the plug; "
                "allowed are dp_replicate_size and dp_shard_size"
            )
    if is_sharded(trainer) and config.memory_format == "channels_last":
        raise UnsupportedRun("memory_format=channels_last: FSDP has laid the weights out; allowed are auto and host")
