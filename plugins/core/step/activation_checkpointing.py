"""Activation checkpointing: blocks keep their input for the backward only, and run again there.

Exact: see `core.step.second_run`. The first window shows what each block spares and how long its forward takes; those
that spare least for their time are let go. `auto` takes all of it off again where the batch fits without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from plugins.config import AccelConfig
from plugins.core.step.blocks import pieces
from plugins.core.step.checkpointed_module import Block, CheckpointedModule, Savings
from plugins.core.system import memory, versions
from plugins.core.system.shortage import GIB

LET_GO = 0.04  # of what all blocks spare: those that spare least for their time
MARGIN = 1.15  # on a forecast of memory: pieces that do not fit again
HOSTS_OWN = ("gradient_checkpointing", "grad_checkpointing")  # as transformers, diffusers and timm name it


class ActivationCheckpointing:
    """Checkpointed calls on a model's blocks, by the settings.

    Args:
        config: the settings.
        model: the bare module.
        device: of the model.
        warn: tells the user a line, once.

    Attributes:
        standing: what is in force and why, for the report.
    """

    def __init__(
        self, config: AccelConfig, model: nn.Module, device: torch.device, warn: Callable[[str], None]
    ) -> None:
        self.config, self.model, self.device, self.warn = config, model, device, warn
        self.standing = "off"
        self.modules: list[CheckpointedModule] = []
        self.savings = Savings(device)
        self._left_out: set[str] = set()
        self._on_trial = False  # `auto` has yet to see whether the batch fits without
        self._reason = ""

    def start(self) -> None:
        """At the start of the run."""
        if self.config.checkpointing == "auto" and not versions.SAVED_TENSORS.here:
            self._none("checkpointing=auto", "this torch cannot tell what a block keeps")
        elif self.config.checkpointing != "off":
            self._on_trial = self.config.checkpointing == "auto"
            self.enable(f"checkpointing={self.config.checkpointing}")

    @property
    def blocks(self) -> list[Block]:
        """Those whose forward runs again in the backward."""
        return [block for module in self.modules for block in module.blocks if block.active]

    def enable(self, reason: str) -> bool:
        """Checkpoint from the next forward on: at the start, or between windows.

        Args:
            reason: for the report.

        Returns:
            Whether it is in force now and was not before.
        """
        if self.modules:
            return False
        if any(getattr(m, name, False) is True for m in self.model.modules() for name in HOSTS_OWN):
            return self._none(reason, "the model's own gradient checkpointing is on, and stays")
        found = pieces(self.model)
        if not found:
            return self._none(reason, "the model has no blocks that could run again")
        names = {id(module): name for name, module in self.model.named_modules()}
        self.savings = Savings(self.device)
        owners = {id(piece.owner): piece.owner for piece in found}
        for owner in owners.values():
            blocks = [
                Block(names[id(p.parts[0])], p.parts, p.start, self.savings, self._not_this)
                for p in found
                if p.owner is owner
            ]
            self.modules.append(CheckpointedModule(owner, blocks, self._training))
        for module in self.modules:
            module.install()
        self._reason = reason
        self._tell()
        return True

    def window_closed(self, peak_gib: float | None) -> None:
        """The first one says what each block is worth, and to `auto` whether the batch fits without.

        Args:
            peak_gib: of memory so far, the update included.
        """
        if not (self.modules and self.savings.counting):
            return
        self.savings.counting = False
        if not any(block.seconds for block in self.blocks):
            self.standing = "off: no block was called by itself, as in a model that is compiled whole"
            if self._on_trial:
                self.undo()
            return
        if self._on_trial:
            self._on_trial = False
            need = MARGIN * self.savings.most / GIB
            free = memory.free_beyond_gib(self.device, peak_gib or 0.0)
            if need <= free:
                self.undo()
                self.standing = f"off: the batch fits without, {need:.2f} GiB more of {free:.2f} GiB that are free"
                return
            self._reason += f", {need:.2f} GiB more would be needed of {free:.2f} GiB that are free"
        if versions.SAVED_TENSORS.here:
            self._let_go()
        self._tell()

    def undo(self) -> None:
        """Off the model."""
        for module in self.modules:
            module.undo()
        self.modules = []

    def _let_go(self) -> None:
        """Those that spare least per second of a forward keep their activations; one that was not called stays."""
        called = [block for block in self.blocks if block.seconds]
        room = LET_GO * sum(block.saved for block in called)
        for block in sorted(called, key=lambda b: b.saved / b.seconds):
            if block.saved <= room:
                block.active = False
                room -= block.saved
            block.saved = 0  # counted no more

    def _training(self) -> bool:
        return self.model.training

    def _none(self, reason: str, why: str) -> bool:
        self.standing = f"off: {why}"
        self.warn(f"{reason}: {why}")
        return False

    def _not_this(self, name: str, why: str) -> None:
        if not self._left_out:
            self.warn(f"checkpointing: {name} keeps its activations: {why}")
        self._left_out.add(name)

    def _tell(self) -> None:
        count = len(self.blocks)
        found = sum(len(module.blocks) for module in self.modules)
        self.standing = f"on: {count} of {found} blocks, {self._reason}"
