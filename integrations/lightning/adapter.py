"""Translates the events of one `Trainer.fit` into the session's hooks. All patches are put on here.

Lightning has an event for nearly everything, so little is patched, all of it on the trainer and nothing on the user's
module: `accumulate_grad_batches`, where the settings ask for another, `gradient_clip_val` at `clip_norm=off`, and the
precision plugin's `train_step_context`, where a plan may switch autocast. A loss is weighted through its gradient, so
what the module logs stays the host's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn

from integrations.contract import HostTools, Outcome, Session
from integrations.lightning.precision_layout import Layout
from integrations.patches import Patches
from integrations.refusal import UnsupportedRun
from integrations.shared.batch_size import micro_batches_per_update

ENDLESS = 100_000  # micro-batches that a fit without an end is taken to have left
KEY = "accel"  # of what we add to the checkpoint
TRAIN_LOSS = ("train_loss_epoch", "train_loss", "loss")  # as modules log them
VALID_LOSS = ("val_loss_epoch", "val_loss", "valid_loss")
OWN_FIELDS = ("model", "optimizer", "scaler")  # of the run's state: in the host's own checkpoint


class Adapter:
    """One fit of one module.

    Args:
        trainer: Lightning's.
        module: the user's LightningModule.
        tools: parts of the core that the plug hands in.
        count: of a batch, the targets that its loss is a mean over; None counts samples.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        tools: HostTools,
        count: Callable[[Any], float | Tensor] | None,
    ) -> None:
        self.trainer, self.module, self.tools, self.count = trainer, module, tools, count
        self.patches, self.config = Patches(), tools.config
        self._outcome: Outcome | None = None
        self._weight: Tensor | float = 1.0
        self._swapped = ExitStack()
        refuse(trainer, module)
        if isinstance(self.config.seed, int):
            tools.files.seed_everything(self.config.seed)
        try:
            self.layout = Layout(trainer, module, self.patches)
            self.average = tools.average(module)
            self.session = self._begin()
        except BaseException:
            self.patches.undo()
            raise
        self.session.report.ema.decay = self.average.decay if self.average is not None else None
        if count is None:
            self.session.warn("losses are taken as means over samples; AccelLightning(weight=...) counts other targets")

    def _begin(self) -> Session:
        trainer, module, device = self.trainer, self.module, self.trainer.strategy.root_device
        start = self.tools.start(device)
        self.layout.apply(start.precision, start.memory_format)
        accumulated = self._accumulate()
        if self.config.clip_norm != "host" and trainer.gradient_clip_val:  # ours, or none
            self.patches.put(trainer, "gradient_clip_val", None)
        return self.tools.new_session(
            module,
            trainer.optimizers[0],
            device=device,
            micro_batch=self._samples_of_loader,
            size=None,  # an epoch's end closes a window, whatever it holds
            expected=accumulated,
            average=self.average,
            takes=lambda args: module.training or self.config.validate_ == "compiled",
            uncompilable=uncompilable(module),
        )

    # -- settings ------------------------------------------------------------------------------------------------

    def _accumulate(self) -> int:
        """K, put on the trainer where the settings say another one than it has."""
        trainer, host = self.trainer, int(self.trainer.accumulate_grad_batches)
        step = self._samples_of_loader * trainer.world_size
        if self.config.effective_batch != "host" and not step:
            raise UnsupportedRun(f"effective_batch={self.config.effective_batch}: the loader has no batch_size")
        named = f"batch_size x {trainer.world_size} ranks = {step}"
        size = micro_batches_per_update(self.config, step, host=host, named=named)
        if size != host:
            self.patches.put(trainer, "accumulate_grad_batches", size)
        return size

    @property
    def _samples_of_loader(self) -> int:
        """Of a rank's batch; 0 where the loader does not say."""
        return int(getattr(self.trainer.train_dataloader, "batch_size", None) or 0)

    # -- one micro-batch, in the host's order ----------------------------------------------------------------------

    def batch_start(self, batch: Any, index: int) -> None:
        """on_train_batch_start."""
        session = self.session
        first = session.window.empty
        samples = _samples(batch)
        session.micro_batch(samples, self.trainer.accumulate_grad_batches)
        shape = next((tuple(value.shape) for value in _tensors(batch) if value.dim()), ())
        session.shape(shape)
        if first:
            session.training_mode()
            session.plan_window(self.layout.at((batch, index)), self._left(index), shape)
        self._weight = session.mean(samples if self.count is None else self.count(batch))

    def _left(self, index: int) -> int:
        trainer = self.trainer
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else trainer.current_epoch + 1
        left = trainer.num_training_batches * (epochs - trainer.current_epoch) - index
        if trainer.max_steps and trainer.max_steps > 0:
            left = min(left, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        return int(max(min(left, ENDLESS), 0))

    def before_backward(self, loss: Tensor) -> None:
        """on_before_backward: the host's 1/K goes, our weight comes; ranks' gradients are averaged, and add up."""
        if not loss.requires_grad:
            return
        self.session.loss(loss * self.trainer.accumulate_grad_batches, self._weight)  # the module's own
        weighted = self.session.window.weighted
        ranks = self.trainer.world_size if weighted else 1
        host_share = self.trainer.accumulate_grad_batches if weighted else 1
        factor = self._weight * (ranks * host_share)
        if isinstance(factor, Tensor) or factor != 1.0:
            loss.register_hook(lambda gradient: gradient * factor)

    def before_step(self) -> None:
        """on_before_optimizer_step: gradients are unscaled and reduced; put them right before the host clips."""
        self._outcome = self.session.prepare_update()
        if not self._outcome.stepped:
            for parameter in self.session.parameters():
                parameter.grad = None  # the host steps all the same; without gradients nothing moves

    def batch_end(self) -> None:
        """on_train_batch_end."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self.session.finish_update(outcome)
        self.session.idle()

    # -- validation and checkpoints ----------------------------------------------------------------------------------

    def validation_start(self) -> None:
        """Validation runs from here on, with the averaged weights where there is an average."""
        self._swapped.enter_context(self.session.validation())
        if self.average is not None:
            self._swapped.enter_context(self.average.swapped())

    def validation_end(self) -> None:
        """Training goes on, with the live weights; losses logged under the usual names go into the report."""
        self._swapped.close()
        losses, logged = self.session.report.losses, self.trainer.callback_metrics
        for curve, names in ((losses.train, TRAIN_LOSS), (losses.valid, VALID_LOSS)):
            if (name := next((name for name in names if name in logged), "")) and logged[name].numel() == 1:
                curve.append((self.trainer.global_step, float(logged[name])))

    def save(self, checkpoint: dict[str, Any]) -> None:
        """The averaged weights go where the host looks for the model's, the raw ones beside what a resume needs."""
        held = {**self.session.run_state().without(*OWN_FIELDS).state_dict()}
        if self.average is not None:
            with self.average.unswapped():
                held["model"] = _copied(self.module)
            with self.average.swapped():
                checkpoint["state_dict"] = _copied(self.module)
        checkpoint[KEY] = held

    def resume(self, state: dict[str, Any]) -> None:
        """In `on_train_start`: the host has put its own back. The random state is back already."""
        if "model" in state:
            self.module.load_state_dict(state["model"])
        self.session.run_state().without(*OWN_FIELDS).load_state_dict(state)

    def end(self, adopt: bool) -> None:
        """Take everything off; after a run that ended well the module keeps the averaged weights."""
        self._swapped.close()
        if adopt and self.average is not None:
            self.average.adopt()
        self.patches.undo()
        self.session.end(run_folder(self.trainer) if self.trainer.is_global_zero else None)


def run_folder(trainer: Any) -> Path:
    """The version's own folder of a logger that writes files; without one what the host falls back to.

    `trainer.log_dir` would ask all ranks, and the others may be gone after an error.
    """
    folder = getattr(trainer.logger, "log_dir", None)
    return Path(folder if isinstance(folder, (str, Path)) else trainer.default_root_dir)


def refuse(trainer: Any, module: Any) -> None:
    """What this host can do and the plug cannot.

    Raises:
        UnsupportedRun: one line that names it.
    """
    if not module.automatic_optimization:
        raise UnsupportedRun("automatic_optimization=False: the module steps by itself; use plugins.loop.Accelerated")
    if len(trainer.optimizers) != 1:
        raise UnsupportedRun(f"{len(trainer.optimizers)} optimizers: the plug takes one; use plugins.loop.Accelerated")
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        name = type(trainer.strategy).__name__
        raise UnsupportedRun(f"strategy={name}: allowed are a single device and DDP")


def uncompilable(module: Any) -> str:
    """Why this module's forward cannot be compiled, or empty."""
    kind = type(module)
    if kind.forward is L.LightningModule.forward:
        return f"{kind.__name__} has no forward; call one in training_step, and it can be compiled"
    return ""


def _copied(module: nn.Module) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in module.state_dict().items()}


def _samples(batch: Any) -> int:
    try:
        return int(extract_batch_size(batch))
    except Exception:
        return 1


def _tensors(batch: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
