"""Everything that is put on a Trainer instance, in one place, and the translation of its events for the seam.

Two groups of patches. `entry` stays while the callback is in the trainer, because it must be there before
`train()` or `evaluate()` begins: `train`, `_inner_training_loop`, `_get_dataloader`, `evaluation_loop`. `run` holds
for one run and is undone at its end and on an exception: `compute_loss`, `training_step`, `get_batch_samples`,
`_get_num_items_in_batch`, `prediction_step`, `_clip_grad_norm`, `_get_grad_norm`, `save_model`,
`_save_checkpoint`, `_run_epoch`, `loss_is_scaled_for_ga`, `compute_loss_context_manager`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from integrations.huggingface import arguments, checkpoints, counting, evaluation
from integrations.huggingface.holding import Held, caller_local
from integrations.huggingface.lengths import length_key
from integrations.huggingface.loaders import Loaders
from integrations.huggingface.losses import Losses
from integrations.seam import UnsupportedRun


class Adapter:
    """One trainer and the session that answers it.

    Args:
        trainer: the host's; kept weakly, so the callback does not keep it alive.
        new_session: gives a fresh session for a run.
        tools: what the plug hands in from the core: `average(model)` -> EMA or None, `reestimate`, `precision`.
    """

    def __init__(self, trainer: Any, callback: Any, new_session: Callable[[], Any], tools: Any) -> None:
        self._late = caller_local("_inner_training_loop", "train_dataloader") is not None
        self._late_loader: Any = None
        self._trainer = weakref.ref(trainer)
        self._callback = weakref.ref(callback)
        self.new_session, self.tools = new_session, tools
        self.session: Any = None
        self.average: Any = None
        self.outcome: Any = None
        self.config = tools.config
        self.entry, self.run = Held(trainer), Held(trainer)
        self.arguments = Held(trainer.args)
        self.on_model: Held | None = None
        self.losses = Losses(trainer, self.config.normalise == "exact", self._approximate)
        self.loaders = Loaders(trainer, self.config.buckets, self.config.recompile_budget, self._say)
        self.micro_batches: list[Any] = []
        self._left = 0  # micro-batches of the window that are still to come
        self._evaluating = False
        self._failed_batch = 0
        self._told: list[tuple[str, str]] = []
        arguments.refuse_contradictions(trainer, self.config)
        if self._late:
            arguments.refuse_late(trainer, self.config)
        self._install_entry()

    @property
    def trainer(self) -> Any:
        return self._trainer()

    # -- patches -----------------------------------------------------------------------------------------------

    def _install_entry(self) -> None:
        for name, replacement in (
            ("train", self._train),
            ("_inner_training_loop", self._inner_training_loop),
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
        losses, compute_loss = self.losses, self.trainer.compute_loss
        patches.method("compute_loss", self._compute_loss)
        patches.method("_get_num_items_in_batch", self._get_num_items_in_batch)
        patches.method("prediction_step", lambda o, *a, **k: losses.prediction_step(o, compute_loss, *a, **k))
        self._plain_compute_loss = compute_loss

    def _install_run(self) -> None:
        patches = self.run
        self._install_losses(patches)
        patches.method("training_step", self._training_step)
        patches.method("get_batch_samples", self._get_batch_samples)
        patches.method("_clip_grad_norm", lambda original, model: None)
        patches.method("_get_grad_norm", self._get_grad_norm)
        patches.method("save_model", self._save_model)
        patches.method("_save_checkpoint", self._save_checkpoint)
        patches.method("_run_epoch", self._run_epoch)
        self._host_scaled = self.trainer.loss_is_scaled_for_ga
        patches.value("loss_is_scaled_for_ga", self._host_scaled)
        if self._autocast() is not None:
            patches.method("compute_loss_context_manager", self._compute_loss_context)

    def detach(self) -> None:
        """Take everything off the trainer."""
        self.end(report=False)
        self.entry.undo()

    # -- a run -------------------------------------------------------------------------------------------------

    def _train(
        self, original: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        trainer = self.trainer
        run = Path(trainer.args.output_dir)
        if trainer.args.should_save and run.is_dir():
            checkpoints.sweep(run)
        trainer.accelerator.wait_for_everyone()
        if resume_from_checkpoint is True:
            found, passed = checkpoints.newest_complete(run) if run.is_dir() else (None, [])
            for line in passed:
                self._say(f"resume_from_checkpoint=True: {line}; an older one is taken")
            resume_from_checkpoint = str(found) if found else True  # the host says that there is none
        try:
            return original(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._failed_batch = 0
            self.end()

    def _inner_training_loop(
        self, original: Callable[..., Any], batch_size: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        trainer = self.trainer
        if trainer.args.auto_find_batch_size and batch_size:
            batch_size = self._keep_effective_batch(batch_size)
        else:
            arguments.apply(trainer, self.config, self.arguments)
        if self.config.seed != "host":
            self.tools.seed(self.config.seed)
        try:
            return original(batch_size, *args, **kwargs)
        except BaseException:
            self._failed_batch = batch_size or 0
            self.end()
            raise

    def _keep_effective_batch(self, micro_batch: int) -> int:
        """After an out-of-memory retry: fewer samples a micro-batch, more micro-batches, the same update."""
        trainer = self.trainer
        self.arguments.undo()
        arguments.apply(trainer, self.config, self.arguments)
        wanted = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
        allowed = min(micro_batch, self._failed_batch - 1) if self._failed_batch else micro_batch
        if allowed < 1:
            return 0  # the host says that no batch size fits
        size, accumulate = arguments.same_effective_batch(wanted, allowed)
        if size != trainer.args.train_batch_size:
            self._say(
                f"out of memory: {trainer.args.train_batch_size} x {trainer.args.gradient_accumulation_steps} becomes "
                f"{size} x {accumulate}; an update still has {wanted} samples"
            )
            self.arguments.value("gradient_accumulation_steps", accumulate)
        return size

    def begin(self) -> None:
        """on_train_begin: everything is built and wrapped. Fires again when the host retries."""
        trainer = self.trainer
        if self.session is not None:
            self.end(report=False)
        self.session = session = self.new_session()
        self.losses = Losses(trainer, self.config.normalise == "exact", self._approximate)
        self.losses.seam = session
        self.outcome = None
        self._install_run()
        self.on_model = Held(trainer.model)
        model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
        if self.config.compile == "on" and getattr(model.config, "use_cache", False):
            self.on_config = Held(model.config)
            self.on_config.value("use_cache", False)
        self.average = self.tools.average(model)
        session.model_ready(
            model,
            _bare(trainer.optimizer),
            device=args.device,
            micro_batch=trainer._train_batch_size,
            size=args.gradient_accumulation_steps,
            clip_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
            scaler=trainer.accelerator.scaler,
            average=self.average,
            dims=(1,) if length_key(trainer.processing_class, model) == "input_ids" else (),
            takes=lambda _: model.training or (self._evaluating and self.config.validate_ == "compiled"),
        )
        if session.update.keep_gradients:
            wrapped = trainer.model_wrapped
            wrapped.zero_grad = lambda set_to_none=True: type(wrapped).zero_grad(wrapped, set_to_none=False)
        self._facts()
        resumed = caller_local("_inner_training_loop", "resume_from_checkpoint")
        if resumed:
            self._resume(Path(resumed))

    def _facts(self) -> None:
        report, loaders = self.session.report, self.loaders
        report.shapes.buckets = list(loaders.edges)
        report.ema.decay = getattr(self.average, "decay", None)
        for kind, text in self._told:
            getattr(self.session, kind)(text)
        self._told.clear()
        if self.trainer.args.torch_compile:
            self.session.warn("torch_compile=True: the host compiles; the plug leaves compiling to it")

    def end(self, report: bool = True) -> None:
        """The end of a run, also on an exception: undo, and write the report. Safe to call twice."""
        session, self.session = self.session, None
        trainer = self.trainer
        self.run.undo()
        self.arguments.undo()
        if session is None:
            return
        vars(trainer.model_wrapped).pop("zero_grad", None)
        config = self.__dict__.pop("on_config", None)
        if config is not None:
            config.undo()
        folder = Path(trainer.args.output_dir) if report and trainer.args.should_save else None
        session.end(folder)
        self.average = None
        self.micro_batches = []
        self._late, self._late_loader = False, None

    def finish(self) -> None:
        """on_train_end: what the model holds from here on is what was evaluated and saved."""
        trainer = self.trainer
        best = trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None
        if self.average is not None and not best:
            self.average.adopt()
        self.end()

    # -- a window ----------------------------------------------------------------------------------------------

    def _get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.session.idle()
        found = original(*args, **kwargs)
        self._left = len(found[0])
        if self.config.batchnorm == "precise":
            self.micro_batches = list(found[0])
        return found

    def _get_num_items_in_batch(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        losses = self.losses
        if self._evaluating or self.session is None:
            return losses.evaluation_count(original, batches, device)
        if not losses.known and batches:
            self._set_problem_type(batches[0])
            losses.find_rule(batches, self._plain_compute_loss)
        found = losses.begin_window(original, batches, device)
        # the host divides a loss by K unless it is told that it is scaled already
        self.trainer.loss_is_scaled_for_ga = True if losses.weighs else self._host_scaled
        return found

    def _set_problem_type(self, batch: Any) -> None:
        """Heads write it into their config in the first forward, which would make the compiler start again."""
        model = counting.base(self.trainer.accelerator.unwrap_model(self.trainer.model))
        labels = batch.get("labels") if isinstance(batch, counting.Mapping) else None
        head = re.search(r"For(Sequence|Image|Video|Audio)Classification$", type(model).__name__)
        if isinstance(labels, Tensor) and head and getattr(model.config, "problem_type", "") is None:
            model.config.problem_type = counting.problem_type(model.config, labels)

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._evaluating or self.session is None:
            return self.losses.evaluation_loss(original, *args, **kwargs)
        self.session.training_mode()  # the host has just set it
        return self.losses.training_loss(original, *args, **kwargs)

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        named = isinstance(inputs, counting.Mapping)
        self.session.micro_batch(counting.samples(inputs) if named else 1)
        main, mask = (_main_input(inputs), inputs.get("attention_mask")) if named else (None, None)
        if main is not None:
            # on a device the sum would make the host wait; there the buckets' own plan gives the padding
            here = isinstance(mask, Tensor) and mask.dim() == 2 and mask.device.type == "cpu"
            self.session.shape(main.shape, mask.numel() - int(mask.sum()) if here and mask is not None else 0)
        loss = original(model, inputs, *args, **kwargs)
        self._left -= 1
        if self._left:
            self.session.idle()
        return loss

    def _get_grad_norm(self, original: Callable[..., Any], model: Any, grad_norm: Any = None) -> Any:
        """The host asks for the norm once a window, after the last backward: the moment to put gradients right."""
        self.outcome = self.session.prepare()
        return self.outcome.norm

    def before_step(self) -> None:
        """on_pre_optimizer_step. Without gradients the host's step moves nothing; a scaler skips by itself."""
        if self.outcome is None or self.outcome.stepped:
            return
        for number in self.losses.not_finite():
            self.session.warn(
                f"step {self.trainer.state.global_step + 1}: the loss of micro-batch {number} is not finite"
            )
        if self.session.update.scaler is None:
            for parameter in self.session.update.parameters():
                parameter.grad = None
            self.trainer.optimizer._is_overflow = True  # so the host leaves its schedule alone too

    def after_step(self) -> None:
        """on_optimizer_step."""
        if self.outcome is not None:
            self.session.update.finish(self.outcome)
            self.session.closed(self.outcome)

    def step_ended(self) -> None:
        """on_step_end."""
        if self.outcome is not None and not self.outcome.stepped and self.session.update.scaler is None:
            self.trainer.optimizer._is_overflow = False
        self.outcome = None

    def _run_epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._late_loader is None and self._late and "train_dataloader" in kwargs:
            # The callback came after the host had built its loader; with buckets an epoch has as many steps.
            self._late_loader = self.trainer.get_train_dataloader()
            self._facts()
        if self._late_loader is not None and self.loaders.edges:
            kwargs["train_dataloader"] = self._late_loader
        self.loaders.set_epoch(kwargs.get("epoch", 0))
        try:
            return original(*args, **kwargs)
        except BaseException:
            self.end()
            raise

    # -- precision ---------------------------------------------------------------------------------------------

    def _autocast(self) -> torch.dtype | None:
        args = self.trainer.args
        return None if args.bf16 or args.fp16 else self.tools.autocast(self.config.precision, args.device)

    def _compute_loss_context(self, original: Callable[..., Any]) -> Any:
        stack = ExitStack()
        stack.enter_context(original())
        stack.enter_context(torch.autocast(self.trainer.args.device.type, self._autocast()))
        return stack

    # -- evaluation --------------------------------------------------------------------------------------------

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer, session = self.trainer, self.session
        scoped = Held(trainer)
        before, self._evaluating = self._evaluating, True
        try:
            if session is None:
                self._install_losses(scoped)
            elif self.micro_batches:
                self._reestimate()
            with self._averaged(), session.validation() if session is not None else nullcontext():
                return evaluation.run(original, trainer, self.losses, *args, **kwargs)
        finally:
            self._evaluating = before
            scoped.undo()

    def _averaged(self) -> Any:
        return self.average.swapped() if self.average is not None else nullcontext()

    def _reestimate(self) -> None:
        """batchnorm=precise: running statistics over the last window's data, with the weights to be evaluated."""
        trainer = self.trainer
        with self._averaged():
            self.tools.reestimate(
                trainer.accelerator.unwrap_model(trainer.model),
                self.micro_batches,
                lambda batch: trainer.model(**trainer._prepare_inputs(batch)),
            )

    # -- checkpoints -------------------------------------------------------------------------------------------

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return original(*args, **kwargs)

    def _save_checkpoint(self, original: Callable[..., Any], model: Any, trial: Any) -> None:
        trainer = self.trainer
        state, main = trainer.state, trainer.args.should_save
        run = Path(trainer._get_output_dir(trial=trial))
        final = run / f"checkpoint-{state.global_step}"
        pushed: list[Any] = []
        with checkpoints.unfinished(final, main, trainer.accelerator.wait_for_everyone) as temporary:
            scoped = Held(trainer)
            scoped.value("_get_output_dir", lambda trial=None: str(temporary))
            scoped.value("_push_from_checkpoint", pushed.append)
            try:
                original(model, trial)
            finally:
                scoped.undo()
            if state.best_global_step:
                best = run / f"checkpoint-{state.best_global_step}"
                if best == final or best.is_dir():
                    state.best_model_checkpoint = str(best)
            if main:
                folder = temporary / final.name
                self._save_state(folder)
                state.save_to_json(str(folder / checkpoints.TRAINER_STATE))
        self.session.report.checkpoints.append(final.name)
        if pushed:
            trainer._push_from_checkpoint(str(final))
        if main:
            _rotate(trainer, run)

    def _save_state(self, folder: Path) -> None:
        """What the host's checkpoint leaves out: the raw weights beside the averaged ones, and the counts."""
        average = self.average
        torch.save(
            {
                "raw": average.live() if average is not None else {},
                "average_updates": average.updates if average is not None else 0,
                "counts": self.session.counts(),
            },
            folder / checkpoints.STATE,
        )

    def _resume(self, checkpoint: Path) -> None:
        path = checkpoint / checkpoints.STATE
        if not path.is_file():
            if self.average is not None:
                self.session.warn(f"{checkpoint.name} was saved without ema; the average starts from its weights")
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.session.set_counts(state["counts"])
        if not state["raw"]:
            return
        if self.average is not None:
            self.average.resume(state["raw"], state["average_updates"])
            return
        self.session.warn(f"{checkpoint.name} holds averaged weights and ema is off: its raw weights are taken")
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, tensor in state["raw"].items():
                live[name].copy_(tensor)

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


def _bare(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer") and hasattr(optimizer, "step_was_skipped"):
        optimizer = optimizer.optimizer
    return optimizer


def _main_input(inputs: Any) -> Tensor | None:
    if not isinstance(inputs, counting.Mapping):
        return None
    for name in ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds"):
        if isinstance(inputs.get(name), Tensor):
            return inputs[name]
    return next((v for v in inputs.values() if isinstance(v, Tensor)), None)


def _rotate(trainer: Any, run: Path) -> None:
    from transformers.trainer_utils import rotate_checkpoints

    rotate_checkpoints(
        output_dir=str(run),
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


__all__ = ["Adapter", "UnsupportedRun"]
