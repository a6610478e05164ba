"""A trial of a Trainer's run: its files in another folder, another micro-batch, and no reports to services."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

REPORTS = "transformers.integrations"


def limit(trainer: Any, folder: Path, micro_batch: int | None, sized: bool) -> None:
    """Set what a trial changes on a trainer that has just been built.

    Args:
        trainer: the host's.
        folder: takes the place of `output_dir`.
        micro_batch: samples a device and micro-batch, or None for the host's own.
        sized: the settings say how many micro-batches an update has, in the place of the host's arguments.
    """
    args = trainer.args
    _remove_if_new(Path(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    args.output_dir = str(folder)
    if getattr(args, "logging_dir", None) is not None:
        args.logging_dir = str(folder / "runs")
    args.push_to_hub = False
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__module__.startswith(REPORTS):
            trainer.remove_callback(type(callback))
    if sized:
        args.gradient_accumulation_steps = 1
    if micro_batch is not None:
        args.per_device_train_batch_size = micro_batch
        trainer._train_batch_size = args.train_batch_size


def facts(trainer: Any) -> dict[str, Any]:
    """What the long run will do that a trial does not come to: its evaluations and its checkpoints."""
    args, data = trainer.args, trainer.eval_dataset
    keeps = (
        trainer.compute_metrics is not None
        and not args.prediction_loss_only
        and not getattr(args, "batch_eval_metrics", False)
        and trainer.preprocess_logits_for_metrics is None
    )
    samples = len(data) if hasattr(data, "__len__") and not isinstance(data, dict) else 0
    return {
        "evaluation": {"samples": samples, "keeps": bool(keeps and samples)},
        "checkpoints": {"kept": args.save_total_limit} if args.save_total_limit else {},
    }


def _remove_if_new(folder: Path) -> None:
    """The host makes its folder when a trainer is built, before any event: an empty one of now goes again."""
    began = psutil.Process().create_time()
    with contextlib.suppress(OSError):
        while folder.is_dir() and folder.stat().st_ctime >= min(began, time.time()):
            folder.rmdir()  # refuses where something lies in it
            folder = folder.parent
