"""All that is put on a Trainer instance, and its events as calls of `integrations.contract`.

Two groups of patches. `entry` stays while the callback is in the trainer, because it must be there before
`train()` or `evaluate()` begins: `train`, `_inner_training_loop`, `_get_dataloader`, `evaluation_loop`. `run` holds
for one run and is undone at its end and on an exception: `compute_loss`, `training_step`, `get_batch_samples`,
`_get_num_items_in_batch`, `prediction_step`, `_clip_grad_norm`, `_get_grad_norm`, `save_model`,
`_save_checkpoint`, `_run_epoch`, `compute_loss_context_manager`. Where a release lacks one of them: `versions.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from integrations.contract import HostTools, Session, WeightAverage
from integrations.huggingface import arguments, clipping, deepspeed, evaluation, versions
from integrations.huggingface.checkpointing import Saving
from integrations.huggingface.compiling import Generation, in_place_zeros, without_cache
from integrations.huggingface.data import Loaders
from integrations.huggingface.evaluation_memory import KeptPredictions
from integrations.huggingface.frames import caller_local
from integrations.huggingface.lengths import length_key
from integrations.huggingface.loss_scaling import Losses
from integrations.huggingface.losses import read_losses
from integrations.huggingface.padding import covers_unequal_padding
from integrations.huggingface.patches import Held, bare_optimizer, of_host
from integrations.huggingface.precision_layout import Layout
from integrations.huggingface.run_start import Starting
from integrations.huggingface.windows import Windows


class Adapter:
    """One trainer and the session that answers it.

    Args:
        trainer: the host's; kept weakly, so the callback does not keep it alive.
        callback: the plug's; kept weakly.
        tools: what the plug hands in from the core.
    """

    def __init__(self, trainer: Any, callback: Any, tools: HostTools) -> None:
        self._late = caller_local(trainer, "_inner_training_loop", "train_dataloader") is not None
        self._late_loader: Any = None
        self._trainer = weakref.ref(trainer)
        self._callback = weakref.ref(callback)
        self.tools = tools
        self.session: Session | None = None  # while a run goes on
        self.average: WeightAverage | None = None
        self.config = tools.config
        self.entry, self.run = Held(trainer, self._copied), Held(trainer)
        self._on_accelerator = Held(trainer.accelerator)
        self.starting = Starting(trainer, self.config, tools.files.seed_everything, self._say, self.end)
        self.on_model: list[Held] = []  # others on its config, wrapper, sampler and optimizer
        self.losses = Losses(trainer, self.config.normalise == "exact", self._approximate)
        compiled = self.config.validate_ == "compiled"
        self.loaders = Loaders(trainer, self.config.buckets, self.config.recompile_budget, self._say, compiled)
        self.windows: Any = None
        self.layout: Any = None
        self._evaluating, self._generation = False, Generation()
        self._told: list[tuple[str, str]] = []
        arguments.refuse_contradictions(trainer, self.config)
        if self._late:
            arguments.refuse_late(trainer, self.config)
            if self.config.buckets != "off" and not versions.RUN_EPOCH.here:
                self._say(f"buckets={self.config.buckets}: {versions.RUN_EPOCH.without}")
        self._install_entry()

    @property
    def trainer(self) -> Any:
        """The host's, which the adapter keeps weakly; None once it is gone."""
        return self._trainer()

    # -- patches -----------------------------------------------------------------------------------------------

    def _install_entry(self) -> None:
        for name, replacement in (
            ("train", self.starting.train),
            ("_inner_training_loop", self.starting.inner_training_loop),
            ("_get_dataloader", self.loaders.get_dataloader),
            ("evaluation_loop", self._evaluation_loop),
        ):
            self.entry.method(name, self._while_plugged(replacement))

    def _while_plugged(self, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """The host can take the callback out again; the patches then go with it."""

        def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._callback() in self.trainer.callback_handler.callbacks:
                return replacement(original, *args, **kwargs)
            self.detach()
            return original(*args, **kwargs)

        return guarded

    def _install_losses(self, patches: Held) -> None:
        compute_loss = self.trainer.compute_loss
        patches.method("compute_loss", self._compute_loss)
        if versions.COUNT.here:  # an older host counts nothing in an evaluation
            patches.method("_get_num_items_in_batch", self._get_num_items_in_batch)
        patches.method(
            "prediction_step", lambda o, *a, **k: self.losses.evaluation.prediction_step(o, compute_loss, *a, **k)
        )

    def _install_run(self, saving: Saving) -> None:
        patches, windows = self.run, self.windows
        self._install_losses(patches)
        patches.method("training_step", windows.training_step)
        versions.hold_fetching(patches, windows.get_batch_samples, self._get_num_items_in_batch)
        versions.hold_gradients(patches, self._on_accelerator, windows.clip_grad_norm, windows.get_grad_norm)
        patches.method("save_model", saving.save_model)
        patches.method("_save_checkpoint", saving.save_checkpoint)
        if versions.RUN_EPOCH.here:
            patches.method("_run_epoch", self._run_epoch)
        patches.method("compute_loss_context_manager", self.layout.loss_context)

    def _copied(self, trainer: Any) -> None:
        """A deep copy of the trainer is bare; its copy of the callback takes hold of it."""
        ours = self._callback()
        for callback in trainer.callback_handler.callbacks:
            if ours is not None and type(callback) is type(ours) and callback is not ours:
                callback.attach(trainer)

    def detach(self) -> None:
        """Take everything off the trainer."""
        self.end(report=False)
        self.entry.undo()

    # -- a run -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """on_train_begin: everything is built and wrapped. Fires again when the host retries."""
        trainer = self.trainer
        if self.session is not None:
            self.end(report=False)
        model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
        self.losses = Losses(trainer, self.config.normalise == "exact", self._approximate)
        self.average = self.tools.average(model)
        self.layout = Layout(trainer, model, trainer.compute_loss)
        self.on_model = [Held(model)]
        if not self.config.compile == self.config.checkpointing == "off":
            self.on_model += without_cache(model)
            if self.config.validate_ == "compiled":
                self._generation.hold(self.on_model[0])
        engine = deepspeed.engine_of(trainer, self.config.clip_norm)
        self.on_model += [engine] if engine is not None else []
        limit = clipping.limit(trainer, clipping.by_host(trainer, self.config.clip_norm))
        clip_norm = engine.clip_norm if engine is not None else limit or 0
        start = self.tools.start(args.device)
        self.layout.apply(start.precision, start.memory_format)
        self.session = self.losses.session = session = self.tools.new_session(
            model,
            bare_optimizer(trainer.optimizer),
            device=args.device,
            micro_batch=trainer._train_batch_size,
            size=args.gradient_accumulation_steps,
            clip_norm=clip_norm if clip_norm > 0 else None,
            scaler=trainer.accelerator.scaler,
            average=self.average,
            dims=(1,) if length_key(trainer.processing_class, model) == "input_ids" else (),
            takes=self._takes(model),
            uncompilable=f"{compiles}: the host compiles" if (compiles := arguments.host_compiles(trainer)) else "",
        )
        precise = self.config.batchnorm == "precise"
        self.windows = Windows(trainer, session, self.losses, self.layout, precise, engine)
        self.on_model.append(self.windows.pieces.around_step())
        saving = Saving(trainer, session, self.average, self._averaged)
        self._install_run(saving)
        if args.device.type != "cpu" and self.config.compile != "off" and engine is None:
            self.on_model.append(in_place_zeros(trainer.model_wrapped, session))
        self._facts(session)
        resumed = caller_local(trainer, "_inner_training_loop", "resume_from_checkpoint")
        if resumed:
            saving.resume(Path(resumed))

    def _takes(self, model: Any) -> Callable[[Any], bool]:
        """Which calls are compiled: training's, and evaluation's at validate=compiled; never those of `generate`."""
        compiled = self.config.validate_ == "compiled"
        return lambda _: not self._generation.running and (model.training or (self._evaluating and compiled))

    def _facts(self, session: Session) -> None:
        report, loaders = session.report, self.loaders
        report.shapes.buckets = list(loaders.edges)
        report.ema.decay = getattr(self.average, "decay", None)
        for kind, text in self._told:
            getattr(session, kind)(text)
        self._told.clear()
        if compiles := arguments.host_compiles(self.trainer):
            session.warn(f"{compiles}: the host compiles; the plug leaves compiling to it")

    def end(self, report: bool = True) -> None:
        """The end of a run, also on an exception: undo, and write the report. Safe to call twice."""
        session, self.session = self.session, None
        trainer = self.trainer
        self.run.undo()
        self._on_accelerator.undo()
        if self.windows is not None:
            self.windows.arguments.undo()
        self.starting.arguments.undo()
        if session is not None:
            session.report.shapes.buckets = list(self.loaders.edges)
            read_losses(trainer.state.log_history, session.report.losses)
            folder = Path(trainer.args.output_dir) if report and trainer.args.should_save else None
            session.end(folder)
        if self.layout is not None:
            self.layout.undo()
        for held in self.on_model:
            held.undo()
        self.layout, self.on_model, self.average = None, [], None
        self._late, self._late_loader = False, None

    def finish(self) -> None:
        """on_train_end: what the model holds from here on is what was evaluated and saved."""
        trainer = self.trainer
        self.losses.lost.tell()
        best = trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None
        if self.average is not None and not best:
            self.average.adopt()
        self.end()

    def epoch_begins(self) -> None:
        """on_epoch_begin, before the first batch is drawn, of a host whose loop has no method an epoch."""
        if not versions.RUN_EPOCH.here:
            self.loaders.set_epoch(versions.epoch_at_hand(self.trainer))
            self.on_model += versions.hold_order(self.trainer)

    def _run_epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        late = self._late and self._late_loader is None and "train_dataloader" in kwargs
        if late and of_host(self.trainer.get_train_dataloader):  # a user's own is not asked a second time
            # The callback came after the host had built its loader; with buckets an epoch has as many steps.
            self._late_loader = self.trainer.get_train_dataloader()
            if self.session is not None:
                self._facts(self.session)
        if self._late_loader is not None and self.loaders.builds:
            kwargs["train_dataloader"] = self._late_loader
        self.loaders.set_epoch(kwargs.get("epoch", 0))
        try:
            return original(*args, **kwargs)
        except BaseException:
            self.end()
            raise

    # -- losses, in training and in evaluation -------------------------------------------------------------------

    def _get_num_items_in_batch(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        if self._evaluating or self.session is None:
            return self.losses.evaluation.number(original, batches, device)
        if covers_unequal_padding(self.trainer.model, batches):
            self._approximate("question answering: its softmax covers padding, which differs between micro-batches")
        return self.windows.count(original, batches, device)

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._evaluating or self.session is None:
            return self.losses.evaluation.loss(original, *args, **kwargs)
        return self.windows.compute_loss(original, *args, **kwargs)

    # -- evaluation --------------------------------------------------------------------------------------------

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer, session = self.trainer, self.session
        scoped = Held(trainer)
        before, self._evaluating = self._evaluating, True
        try:
            if session is None:
                self._install_losses(scoped)
            elif self.windows.micro_batches:
                with self._averaged():
                    evaluation.reestimate(trainer, self.tools.reestimate, self.windows.micro_batches)
            with self._averaged(), session.validation() if session is not None else nullcontext():
                kept = KeptPredictions(trainer, self.tools.free_gib, self._say)
                return evaluation.run(original, trainer, self.losses, self.loaders, kept, *args, **kwargs)
        finally:
            self._evaluating = before
            scoped.undo()

    def _averaged(self) -> Any:
        return self.average.swapped() if self.average is not None else nullcontext()

    # -- words -------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._tell("warn", text)

    def _approximate(self, term: str) -> None:
        self._tell("approximate", term)

    def _tell(self, kind: str, text: str) -> None:
        if self.session is not None:
            getattr(self.session, kind)(text)
        elif (kind, text) not in self._told:
            self._told.append((kind, text))
