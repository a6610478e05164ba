"""Holds one Ultralytics trainer: turns its loop into the calls of `integrations.contract`. All patches go on here.

All is done at `on_pretrain_routine_end`, which every rank fires once model, optimizer, EMA and loaders are built.
Patched on the trainer: `optimizer_step`, `preprocess_batch`, `_model_train`, `_build_train_pipeline`, `validate`,
`_close_dataloader_mosaic`, `_handle_nan_recovery`, `save_model`, `final_eval`, and the paths `last`, `best`, `wdir`. On
the live model: `loss`. On its criterion: `loss` and its assigner's `forward`. The module-level `strip_optimizer` is
exchanged only while `final_eval` runs. The trainer's `accumulate` is held at 1, so that `optimizer_step` is called
after every micro-batch; a user's own is called once a window. What callbacks exchange during the run (the optimizer,
the scaler, the criterion, `optimizer_step`, `preprocess_batch`, `model.loss`) is looked up where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from integrations.contract import HostTools, Session, UnsupportedRun
from integrations.patches import Hook, NotCopied, Patches
from integrations.ultralytics import data, ranks, schedule, supported, versions
from integrations.ultralytics.checkpointing import Saving, divided, put_late
from integrations.ultralytics.ema import HostAverage, set_decay
from integrations.ultralytics.loss_scaling import Losses, loss_groups
from integrations.ultralytics.out_of_memory import Rescuing
from integrations.ultralytics.precision_layout import Layout
from integrations.ultralytics.stepping import Stepping, host_clip_norm


class Adapter(NotCopied):
    """`hold` takes the trainer, `release` gives it back as it was."""

    def __init__(self, trainer: Any, tools: HostTools) -> None:
        self.trainer, self.tools = trainer, tools
        self._session: Session | None = None  # until the trainer is held
        self.model: nn.Module = versions.unwrap(trainer.model)
        self.patches = Patches()
        self._callbacks = {
            "on_train_epoch_start": Hook(self._epoch_start),
            "on_train_batch_start": Hook(self._batch_start),
            "on_train_batch_end": Hook(lambda _: self.session.idle()),
            "on_train_epoch_end": Hook(self._epoch_end),
        }
        self._resumed: dict[str, Any] | None = None
        self._draw = data.ScaleDraw()
        self._mosaic_closed = False
        self._index = -1  # of the micro-batch in its epoch
        self._ranks = ranks.RankStates(trainer, self._own_state)

    @property
    def session(self) -> Session:
        """Of the run, from `hold` on."""
        assert self._session is not None
        return self._session

    def hold(self, state: dict[str, Any] | None = None) -> None:
        """Put everything on; `state` is the extra state of a resumed run.

        Raises:
            UnsupportedRun: a setting of the host that the plug refuses.
        """
        trainer, tools, config = self.trainer, self.tools, self.tools.config
        supported.check_trainer(trainer)
        rounded = state is not None or schedule.chosen_by_host(trainer)
        self.size = schedule.window_size(config, trainer.batch_size, rounded)
        host_accumulate = self.patches.put(trainer, "accumulate", trainer.accumulate, hidden=False)
        schedule.scale_learning_rate(trainer, config.lr_scale, (self.size or host_accumulate) / host_accumulate)
        if config.seed != "host":
            tools.files.seed_everything(int(config.seed))
            data.seed(trainer.train_loader, int(config.seed))
        self.layout = Layout(trainer, self.model, self.patches)
        start = tools.start(trainer.device)
        self.layout.start(start.precision, start.memory_format)
        accumulates = (self.size or host_accumulate) > 1
        sync = ranks.hold_reduction(trainer, accumulates)
        groups = loss_groups(self.model, config.normalise)
        self._session = session = tools.new_session(
            self.model,
            trainer.optimizer,
            device=trainer.device,
            micro_batch=trainer.batch_size,
            size=self.size,
            expected=host_accumulate,
            clip_norm=host_clip_norm(trainer.optimizer_step),
            scaler=trainer.scaler,
            average=HostAverage(trainer) if trainer.ema else None,  # an older host has it on rank 0 only
            groups=groups,
            schedule=self._set_rates,
            dims=(2, 3) if getattr(trainer.args, "multi_scale", 0.0) else (),
            takes=lambda args: isinstance(args[0], torch.Tensor),
            sync=sync,
            uncompilable=supported.uncompilable(self.model),
        )
        set_decay(trainer, session, config.ema)
        self.losses = Losses(self.model, session, self.patches, groups)
        self.crosses_epochs = self.losses.crosses_epochs and not ranks.several(trainer)  # rank 0 alone saves its part
        self.rescuing = Rescuing(trainer, session, self.layout, self.losses)
        self._resize(self.size)
        self._patch()
        self.saving = Saving(trainer, session, self.patches, self._state)
        if state is not None:
            self._resume(state)

    def release(self) -> None:
        """Undo every patch; what is left of a window that no save will see is dropped and counted."""
        if self._session is not None and not self._session.window.empty:
            self._session.drop()
        self.patches.undo()
        for event, function in self._callbacks.items():
            if function in self.trainer.callbacks[event]:
                self.trainer.callbacks[event].remove(function)
        ranks.give_back_reduction(self.trainer)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """An error inside undoes every patch and ends the session, and goes on to the caller."""
        try:
            yield
        except BaseException:
            self.release()
            if self._session is not None:
                self._session.end()
            raise

    def _patch(self) -> None:
        trainer, put = self.trainer, self.patches.put
        self.stepping = Stepping(trainer, self.session, self.patches, self._closes_after)
        self._preprocess = self.patches.around(trainer, "preprocess_batch", self._preprocess_batch)
        self._train_mode = put(trainer, "_model_train", self._model_train)
        if versions.PIPELINE.here:
            self._build = put(trainer, "_build_train_pipeline", self._build_train_pipeline)
        self._host_validate = put(trainer, "validate", self._validate)
        if versions.NAN_RECOVERY.here:
            self._recover = put(trainer, "_handle_nan_recovery", self._handle_nan_recovery)
        self._close_mosaic = put(trainer, "_close_dataloader_mosaic", self._close_dataloader_mosaic)
        for event, function in self._callbacks.items():
            first = event == "on_train_epoch_start"  # what a user's callback sets or draws there comes after a resume
            trainer.callbacks[event].insert(0 if first else len(trainer.callbacks[event]), function)

    def _resume(self, state: dict[str, Any]) -> None:
        """Put back what the host's checkpoint lacks; what users' callbacks set from here on holds, as in the host."""
        trainer = self.trainer
        rates = [group["initial_lr"] for group in trainer.optimizer.param_groups]
        now, late = divided(state, self.model)
        self.session.load_state_dict(now)
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate  # settings may have changed with the resume
        if self.size is not None:
            schedule.set_weight_decay(trainer, trainer.batch_size * self.size)
        self._resumed = {**ranks.of_this_rank(trainer, state), "late": late}

    # -- the loop, in its order ---------------------------------------------------------------------------------
    def _epoch_start(self, trainer: Any) -> None:
        """The last moment before the first batch is drawn: put back what a resumed run has to draw from."""
        self._index = -1
        state, self._resumed = self._resumed, None
        if state is not None:
            if lost := put_late(self.model, state["late"]):
                self.session.warn(f"no place in the model for {len(lost)} tensors of the checkpoint, such as {lost[0]}")
            self._mosaic_closed = state["mosaic_closed"]
            if not data.restore(trainer.train_loader, state["loader"], self._mosaic_closed):
                self.session.warn(
                    f"the data set holds {len(trainer.train_loader.dataset)} images, and held "
                    f"{state['data']['samples']} when this checkpoint was saved: their order begins anew"
                )
            self._draw.load(state["draw"])
            self.session.files.set_random_state(state["random"])

    def _close_dataloader_mosaic(self) -> None:
        self._close_mosaic()
        self._mosaic_closed = True

    def _model_train(self) -> None:
        self._train_mode()
        self.session.training_mode()

    def _batch_start(self, trainer: Any) -> None:
        """Take up what callbacks have put on the trainer or its model since the last batch.

        Raises:
            UnsupportedRun: another model.
        """
        if versions.unwrap(trainer.model) is not self.model:
            raise UnsupportedRun(
                "trainer.model: a callback put another model there during the run, which plugins.yolo does not serve; "
                "give it to YOLO(...) before train(), or leave out the plug"
            )
        for wrapped in (self.stepping.around, self._preprocess, self.losses.around, self.saving.around):
            wrapped.stay()
        if self.session.window.empty:
            self.losses.refresh()

    def _preprocess_batch(self, inner: Callable[..., Any], batch: Any) -> dict[str, Any]:
        first = self.session.window.empty
        self._index += 1
        if (chosen := schedule.hold_accumulate(self.trainer, self._index)) is not None:
            self._nominal = chosen
            if self.size is not None:
                self.session.warn(f"trainer.accumulate={chosen}: set by a callback; the plug's own {self.size} holds")
        self.rescuing.note(batch, lambda raw: self._preprocess.enter(self._scaled, raw, first))
        self.session.arrived(expected=self._due() if self.size is None else None)
        batch = self._scaled(inner, batch, first)
        self.session.count(len(batch["img"]))
        self.session.shape(batch["img"].shape)
        if first:
            with torch.autocast(self.trainer.device.type, enabled=False), self.losses.around.without_users():
                trial = self.layout.at(self.rescuing.first_piece(batch))
                self.session.plan_window(trial, self._left(), batch["img"].shape)
        self.rescuing.arm()
        return batch

    def _scaled(self, inner: Callable[..., Any], batch: Any, first: bool) -> dict[str, Any]:
        if getattr(self.trainer.args, "multi_scale", 0.0) and self.session.window.expected > 1:
            return self._draw.preprocess(inner, batch, first)
        found: dict[str, Any] = inner(batch)
        return found

    def _left(self) -> int:
        """Micro-batches that are still to come, this one included."""
        trainer = self.trainer
        return int((trainer.epochs - trainer.epoch) * len(trainer.train_loader) - self._index)

    def _due(self) -> int:
        """Micro-batches after which this window closes; by the host's own rule that changes in warm-up."""
        return self.size or schedule.host_window(self.trainer, self._index, self._nominal)

    def _closes_after(self) -> int:
        """As `_due`; the last batch that a window may have closes it too, before callbacks see the epoch's weights."""
        left = self._left() if self.crosses_epochs else len(self.trainer.train_loader) - self._index
        return 1 if left == 1 else self._due()

    def _set_rates(self, update: int) -> None:
        if self.size is not None:
            an_epoch = len(self.trainer.train_loader) / self.size
            schedule.warm_up(self.trainer, update, an_epoch if self.crosses_epochs else math.ceil(an_epoch))

    def _epoch_end(self, trainer: Any) -> None:
        """Before validation and saving: close what a stop has left of a window."""
        if trainer.epoch + 1 >= trainer.epochs or trainer.stop or not self.crosses_epochs:
            self.stepping.close()
        self._ranks.gather()

    def _validate(self) -> Any:
        if self.trainer.ema:
            self.session.compile_validation(self.trainer.ema.ema)
        with self.session.validation():
            return self._host_validate()

    def _handle_nan_recovery(self, epoch: int) -> bool:
        """A non-finite loss whose update was skipped left no trace: there is nothing to recover from."""
        trainer = self.trainer
        if trainer.loss is not None and not trainer.loss.isfinite() and self.session.config.nonfinite == "skip":
            trainer.loss = torch.zeros_like(trainer.loss)
        with self.patches.lifted(self.model):  # the host pickles a copy of it: a user's function would stand in the way
            recovered = bool(self._recover(epoch))
        if recovered:
            self.session.drop()  # the host throws the gradients away
            set_decay(trainer, self.session, self.session.config.ema)
        return recovered

    def _build_train_pipeline(self) -> None:
        """Built again after the host halved its batch for lack of memory: windows start anew at the new size."""
        self._build()
        self.session.drop()
        self._resize(schedule.window_size(self.session.config, self.trainer.batch_size, rounded=True))

    def _resize(self, size: int | None) -> None:
        self.size = size
        trainer = self.trainer
        self._nominal = trainer.accumulate  # as the host has just computed it from nbs and this batch
        if size is not None:
            total = len(trainer.train_loader) * trainer.epochs
            if size > total:
                self.session.warn(
                    f"{size} micro-batches an update: the run holds only {total}, which make its one update"
                )
            schedule.set_weight_decay(trainer, trainer.batch_size * min(size, total))
        trainer.accumulate = schedule.EVERY
        self.session.resize(size, self._nominal, trainer.batch_size)

    def _state(self) -> dict[str, Any]:
        """What the host's checkpoint lacks: live weights, full-precision optimizer, window, random state, loader."""
        return {
            **self.session.state_dict(),
            **self._own_state(),
            "mosaic_closed": self._mosaic_closed,
            "ranks": self._ranks.gathered,
        }

    def _own_state(self) -> dict[str, Any]:
        """What differs from rank to rank, as the next epoch will find it."""
        return {
            "random": self.session.files.random_state(),
            "loader": data.position(self.trainer.train_loader),
            "draw": self._draw.state(),
        }
