"""A window of the Trainer, event by event: fetched, counted, weighed, put right, stepped."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from integrations.contract import Outcome, Session
from integrations.huggingface import clipping, versions
from integrations.huggingface.deepspeed import OFF, Engine
from integrations.huggingface.loss_rules import counting
from integrations.huggingface.loss_scaling import Losses
from integrations.huggingface.out_of_memory import Pieces
from integrations.huggingface.patches import Held, bare_optimizer, passes_on
from integrations.huggingface.precision_layout import Layout

INPUTS = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds")


class Windows:
    """Answers what the host calls between two updates.

    Args:
        trainer: the host's.
        session: of the run.
        losses: weights of the micro-batches.
        layout: precision and memory format in force.
        keep: True keeps the micro-batches of the latest window (batchnorm=precise).
        engine: DeepSpeed's, where it steps; else None.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        losses: Losses,
        layout: Layout,
        keep: bool,
        engine: Engine | None = None,
    ) -> None:
        self.trainer, self.session, self.losses, self.layout, self.keep = trainer, session, losses, layout, keep
        self.micro_batches: list[Any] = []
        self.engine = engine
        self.outcome: Outcome | None = None
        self._host_clips = False  # this update: asked once, as it looks at every parameter
        self._left = 0  # micro-batches of the window that are still to come
        self._begun = False
        self.arguments = Held(trainer.args)  # of one window
        self.pieces = Pieces(trainer, session, losses)
        self._recount: Callable[[], Any] = lambda: None
        if engine is not None:
            session.measure_nothing("DeepSpeed's engine owns the gradients")
            session.warn(OFF)
        session.rescue.held_by(lambda: self._recount(), self.pieces.keep, self.pieces.begins_anew)

    def get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note how many micro-batches the host has fetched for the next window, and keep them where asked to."""
        if self._begun:
            self.session.idle()  # the last micro-batch of the window before; ahead of the first there was none
        self._begun = True
        found = original(*args, **kwargs)
        self._left = len(found[0])
        versions.hold_tail(self.trainer, self.arguments, self._left)
        if self.keep:
            self.micro_batches = list(found[0])
        return found

    def count(self, original: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        """`_get_num_items_in_batch` of a window."""
        losses = self.losses
        if not losses.known and batches:
            losses.find_rule(batches, self.layout.compute_loss)
        self._recount = lambda: losses.begin_again(original, self._divided(batches), device)
        return losses.begin_window(original, self._divided(batches), device)

    def _divided(self, batches: list[Any]) -> list[Any]:
        return [piece for batch in batches for piece in self.pieces.of(batch)]

    def _set_problem_type(self, batch: Any) -> None:
        """Heads write it into their config in the first forward, which would make the compiler start again."""
        model = counting.base(self.trainer.accelerator.unwrap_model(self.trainer.model))
        labels = batch.get("labels") if isinstance(batch, counting.Mapping) else None
        head = re.search(r"For(Sequence|Image|Video|Audio)Classification$", type(model).__name__)
        if isinstance(labels, Tensor) and head and getattr(model.config, "problem_type", "") is None:
            model.config.problem_type = counting.problem_type(model.config, labels)

    def training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the micro-batch, let a plan be tried at a window's first, and run the host's step; returns its loss."""
        session, named = self.session, isinstance(inputs, counting.Mapping)
        first, samples = session.window.empty, counting.samples(inputs) if named else 1
        step = partial(self._in_pieces, original, model, inputs, *args, **kwargs)
        if self.pieces.guards:
            session.rescue.note(step, samples, partial(self.pieces.cannot, inputs))
        session.micro_batch(samples)
        main = next((inputs[name] for name in INPUTS if isinstance(inputs.get(name), Tensor)), None) if named else None
        if main is not None:
            session.shape(main.shape, _padding(inputs.get("attention_mask")))
        if first:
            self._plan(model, self.pieces.of(inputs)[0], main)
        loss = session.rescue.guarded(step)
        self._left -= 1
        if self._left:
            session.idle()
        return loss

    def _in_pieces(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's step on each piece of a batch; returns the sum of their losses, each its share of the window's."""
        pieces, found = self.pieces.of(inputs), []
        for piece in pieces:
            with (
                self.pieces.as_micro_batches(self.losses.micro_batches, len(pieces)),
                self.losses.micro_batch(original),
            ):
                found.append(self.losses.scaling.logged(original(model, piece, *args, **kwargs)))
        return found[0] if len(found) == 1 else sum(found)

    def _plan(self, model: Any, inputs: Any, main: Tensor | None) -> None:
        """At a window's start; `main` is the input whose shape names the work."""
        session = self.session
        if main is None:
            session.measure_nothing(f"no input is one of {', '.join(INPUTS)}")
        elif not self.losses.weighs:
            session.measure_nothing("the loss is the user's own, or left to the host")
        elif not passes_on(self.trainer):
            session.measure_nothing("the training step, or what prepares its inputs, is the user's own")
        else:
            self._set_problem_type(inputs)
        model.train()
        session.training_mode()
        session.plan_window(self.layout.at(inputs), self._to_come(), () if main is None else main.shape)

    def _to_come(self) -> int:
        state = self.trainer.state
        return max(state.max_steps - state.global_step, 1) * int(self.session.window.expected)

    def compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's or the user's loss on inputs in the storage order in force, weighted as the rule in force says."""
        self.session.training_mode()  # the host has just set it
        return self.losses.training_loss(original, model, self.layout.laid_out(inputs), *args, **kwargs)

    # -- the update --------------------------------------------------------------------------------------------

    def clip_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The host clips, after the last backward: the moment to put gradients right. Returns their norm.

        What the plug leaves to the host's method, or to the user's, runs on what was put right, and says the norm.
        """
        norm = self._put_right().norm
        if not self._host_clips:
            return torch.tensor(norm, dtype=torch.float64)
        with clipping.unscaled(self.trainer):
            return original(*args, **kwargs)

    def get_grad_norm(self, original: Callable[..., Any], model: Any, grad_norm: Any = None) -> Any:
        """The host asks for the norm once a window, and hands in what `clip_grad_norm` gave where it clips."""
        outcome = self._put_right()
        if grad_norm is None and not self._host_clips:
            grad_norm = torch.tensor(outcome.norm, dtype=torch.float64)
        with clipping.unscaled(self.trainer):
            return original(model, grad_norm=grad_norm)

    def _put_right(self) -> Outcome:
        if self.outcome is None:
            self.losses.end_window()
            self.outcome = self._prepared()
        return self.outcome

    def before_step(self) -> None:
        """on_pre_optimizer_step. Without gradients the host's step moves nothing; a scaler skips by itself."""
        self.arguments.undo()
        if self._put_right().stepped:  # so far not asked for by a host that asks for the norm only where it clips
            return
        for number in self.losses.not_finite():
            step = self.trainer.state.global_step + 1
            self.session.warn(f"step {step}: the loss of micro-batch {number} is not finite")
        if self.session.scaler is None and self.engine is None:
            for parameter in self.session.parameters():
                parameter.grad = None
            self.trainer.optimizer._is_overflow = True  # so the host leaves its schedule alone too

    def _prepared(self) -> Outcome:
        """What the update comes to; that of an engine has happened by now, in the last backward."""
        trainer = self.trainer  # whose optimizer and limit a callback may have exchanged
        self._host_clips = clipping.by_host(trainer, self.session.config.clip_norm)
        if self.engine is None:
            limit = clipping.limit(trainer, self._host_clips)
            self.session.use(bare_optimizer(trainer.optimizer), trainer.accelerator.scaler, limit)
            return self.session.prepare_update()
        return self.session.engine_stepped(self.engine.norm, self.engine.stepped)

    def after_step(self) -> None:
        """on_optimizer_step."""
        if self.outcome is not None:
            self.session.finish_update(self.outcome)

    def step_ended(self) -> None:
        """on_step_end."""
        if self.outcome is not None and not self.outcome.stepped and self.session.scaler is None:
            self.trainer.optimizer._is_overflow = False
        self.outcome = None


def _padding(mask: Any) -> int:
    """Tokens that a mask [B, L] on the CPU hides; on a device the sum would make the host wait."""
    here = isinstance(mask, Tensor) and mask.dim() == 2 and mask.device.type == "cpu"
    return mask.numel() - int(mask.sum()) if here else 0
