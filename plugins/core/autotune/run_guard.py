"""Keeps a run as it is while plans are tried on it, or a window is done again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from plugins.core.autotune.timing import attributes_kept, buffers_kept
from plugins.core.checkpoint.rng_state import random_state, set_random_state
from plugins.core.step.accumulation import Window
from plugins.core.step.update import Update
from plugins.core.telemetry.recorder import Recorder


class RunGuard:
    """What trials and a rescue need of their run: the tuner's `Owner`, and the `Run` of `step.rescue`."""

    def __init__(self, model: nn.Module, update: Update, window: Window, recorder: Recorder) -> None:
        self.model, self.update, self.window, self.recorder = model, update, window, recorder
        self.warn, self.sizes, self.out_of_memory = recorder.warn, recorder.sizes, recorder.out_of_memory
        self.forgive = recorder.metrics.forgive

    @property
    def updates(self) -> int:
        """Windows that were closed, skipped updates included."""
        return self.recorder.updates

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What runs inside leaves no trace: window, buffers, plain attributes, gradients, random state.

        Those of the model and its optimizer, and the global generators. What a model or a loss keeps elsewhere is not
        known here, and moves with every trial: a criterion's BatchNorm, a generator of its own, a global list.
        """
        state = random_state()
        try:
            with buffers_kept(self.model), attributes_kept(self.model), self.window.unweighed():
                yield
        finally:
            self.clear_gradients()
            torch.clear_autocast_cache()
            set_random_state(state)

    def clear_gradients(self) -> None:
        """Also of a criterion's own parameters, which the optimizer holds beside the model's."""
        keep = self.update.keep_gradients()
        self.model.zero_grad(set_to_none=not keep)
        for parameter in self.update.parameters():
            if not keep:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def drop(self) -> None:
        """Forget the window; its micro-batches are counted as dropped."""
        self.recorder.report.window.dropped_micro_batches += self.window.micro_batches
        self.window.close()

    def progress(self, text: str) -> None:
        """Show what is being tried; it is no part of the report."""
        sys.stderr.write(f"accel: {text}\n")
