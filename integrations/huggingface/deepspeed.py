"""A Trainer whose updates are DeepSpeed's: which of them are served, and what its engine made of an update.

The engine reduces, checks, clips, steps and clears gradients inside the backward of a window's last micro-batch, before
the host asks for the norm. Losses are weighed before that, as under any engine; norm, clipping and skips are the
engine's, with the plug's settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from integrations.contract import UnsupportedRun
from integrations.huggingface import versions
from integrations.huggingface.patches import Held

OFF = (
    "deepspeed: the engine clips, skips and steps by itself; off are trials (of plan=auto and compile=auto), dividing "
    "a batch that does not fit in memory, and the list of parameters without gradient"
)
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def is_deepspeed(trainer: Any) -> bool:
    """Whether DeepSpeed's engine takes this trainer's updates."""
    return bool(trainer.is_deepspeed_enabled)


def refuse(trainer: Any, config: Any) -> None:
    """Raise UnsupportedRun, one line, for a stage that is not served, or a setting that the engine owns."""
    stage = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.get_value("zero_optimization.stage", 0)
    if stage not in (1, 2):
        raise UnsupportedRun(
            f"deepspeed: ZeRO {stage} is not supported by the plug; set 'stage' to 1 or 2 in zero_optimization, or "
            "shard by fsdp=True with fsdp_config={'version': 2}"
        )
    if not versions.BOUNDARY.here:
        raise UnsupportedRun(
            "deepspeed: not supported beside this accelerate, which lets the engine count micro-batches across the end "
            "of an epoch; update accelerate"
        )
    if config.memory_format == "channels_last":
        raise UnsupportedRun("memory_format=channels_last: DeepSpeed has laid the weights out; allowed are auto, host")
    if config.plan not in ("auto", "off"):
        raise UnsupportedRun(f"plan={config.plan}: DeepSpeed's engine owns the precision; allowed are auto and off")
    host = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"
    if config.precision not in ("host", "auto", host):
        raise UnsupportedRun(
            f"precision={config.precision}: DeepSpeed's engine trains in {host}; set {config.precision} in "
            "TrainingArguments and in DeepSpeed's config, or leave precision=host"
        )
    if config.compile == "on" and config.compile_scope in ("auto", "whole"):
        raise UnsupportedRun(
            "compile=on: DeepSpeed's hooks around the whole forward would end many graphs; set compile_scope=regional, "
            "or name patterns"
        )
    if config.compile == "on" and config.compile_mode in CUDA_GRAPHS:
        raise UnsupportedRun(
            f"compile_mode={config.compile_mode}: CUDA graphs need gradients that stay, and DeepSpeed's engine frees "
            "them; allowed are default and max-autotune-no-cudagraphs"
        )


def loss_scale(trainer: Any) -> float:
    """What the engine multiplies a loss by before its backward (fp16); 1 elsewhere."""
    return float(getattr(trainer.model_wrapped.optimizer, "loss_scale", 1.0))


def engine_of(trainer: Any, clip_norm: str | float) -> Engine | None:
    """The engine of a run that DeepSpeed steps; None of any other. See `Engine`."""
    return Engine(trainer, clip_norm) if is_deepspeed(trainer) else None


class Engine(Held):
    """The engine of one run, with the plug's settings on its optimizer until `undo`.

    Args:
        trainer: the host's, its engine built.
        clip_norm: the setting: L2 norm, `off`, or `host` for the limit of DeepSpeed's own config.
    """

    def __init__(self, trainer: Any, clip_norm: str | float) -> None:
        self._engine = trainer.model_wrapped
        optimizer = self._engine.optimizer
        if not hasattr(optimizer, "check_grad_overflow") and not trainer.args.fp16:
            raise UnsupportedRun(
                f"deepspeed: {type(optimizer).__name__} of this engine skips no update that is not finite; use ZeRO 2 "
                "where gradients add up in fp32, and update DeepSpeed"
            )
        super().__init__(optimizer)
        own = self._engine.gradient_clipping()
        limit = own if clip_norm == "host" else 0 if clip_norm == "off" else clip_norm
        self.clip_norm = float(limit)
        self.value("clip_grad", self.clip_norm)  # at `host` too: a resume has loaded that of the run before
        if self.clip_norm and not getattr(optimizer, "compute_grad_norm", True):
            self.value("compute_grad_norm", True)
        if not getattr(optimizer, "check_grad_overflow", True):  # in fp32, or as bf16's config says
            self.value("check_grad_overflow", True)

        def saved(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = original(*args, **kwargs)
            return {**state, "clip_grad": own} if "clip_grad" in state else state

        self.method("state_dict", saved)

    @property
    def stepped(self) -> bool:
        """Whether the latest update happened; the engine skips one whose gradient is not finite."""
        return bool(self._engine.was_step_applied())

    @property
    def norm(self) -> float:
        """L2 norm of the latest update's gradient over all ranks, before clipping; NaN where it was skipped."""
        norm = self._engine.get_global_grad_norm() if self.stepped else None  # else that of an earlier update
        return math.nan if norm is None else float(norm)
