"""The one resumable state of a run: everything that a bit-for-bit resume needs, said once for all hosts.

Parts of a session have `state_dict` and `load_state_dict`; a `RunState` assembles them into one flat dict of plain
values and tensors, which `weights_only` loading allows. A host whose own checkpoint holds some of its fields leaves
those out:

    state = session.run_state().without("model", "optimizer", "scaler", "average", "random")
    torch.save(state.state_dict(), path)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from plugins.config import AccelConfig
from plugins.core.checkpoint.module_names import load_own_state, own_name, own_state
from plugins.core.checkpoint.rng_state import random_state
from plugins.core.system.sharding import placed_as, placed_for, reshard


@runtime_checkable
class Part(Protocol):
    """A part of a run that gives its fields of the state, and takes them back from the whole of it."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""


class Window(Part, Protocol):
    """The micro-batches of the update that is under way."""

    @property
    def empty(self) -> bool:
        """Whether no micro-batch is in."""


class Update(Protocol):
    """What steps, and what moves with it."""

    @property
    def optimizer(self) -> Any:
        """The one that steps."""

    @property
    def scaler(self) -> Any:
        """The gradient scaler, or None."""

    @property
    def average(self) -> Any:
        """What is moved after every update, or None."""

    def beside(self, model: nn.Module) -> list[nn.Parameter]:
        """Parameters that the optimizer holds and the model does not."""


class RunState:
    """The state of one run, field by field.

    Args:
        config: the settings in force, saved for a person to read.
        model: the bare module.
        update: holds optimizer, scaler and average.
        window: micro-batches of the update that is under way.
        statistics: BatchNorm's, as that window began.
        recorder: counts.
        tuner: the plan in force, the switches so far, and whether the run has measured.
        rescue: how far batches are divided since memory ran out.
    """

    def __init__(
        self,
        config: AccelConfig,
        model: nn.Module,
        update: Update,
        window: Window,
        statistics: Part,
        recorder: Part,
        tuner: Part,
        rescue: Part,
    ) -> None:
        reshard(model)
        average = update.average if isinstance(update.average, Part) else None
        self._parts: dict[str, Part] = {  # in the order in which they are put back
            "config": _Settings(config),
            "model": _Model(model),
            "beside_model": _BesideModel(model, update, window),
            "optimizer": _Optimizer(update.optimizer),
            "scaler": _Named("scaler", update.scaler),
            "average": _Named("average", average),
            "window": _Named("window", window),
            "gradients": _OpenWindow(model, window, statistics),
            "counts": _Named("counts", recorder),
            "plan": tuner,
            "rescue": _Named("rescue", rescue),
            "random": _Generators(),
        }

    def without(self, *fields: str) -> RunState:
        """The state without fields that a host's own checkpoint holds.

        Args:
            fields: of `config`, `model`, `beside_model`, `optimizer`, `scaler`, `average`, `window`, `gradients` (with
                the statistics of an open window), `counts`, `plan` (with its switches), `rescue` and `random`.

        Raises:
            KeyError: there is no such field.
        """
        less = copy.copy(self)
        less._parts = dict(self._parts)
        for field in fields:
            del less._parts[field]
        return less

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; the latter share memory with the run."""
        return {name: value for part in self._parts.values() for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` holds of these fields; what an earlier release did not save stays as it is.

        The random state is not put back here: that is for the last moment before the first batch is drawn.
        """
        for part in self._parts.values():
            part.load_state_dict(state)


class _Named:
    """A part under a name of its own; nothing where the run has none, or the file was written without."""

    def __init__(self, name: str, part: Any) -> None:
        self.name, self.part = name, part

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.part.state_dict() if self.part is not None else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.part is not None and state.get(self.name):
            self.part.load_state_dict(state[self.name])


class _Optimizer(_Named):
    """The optimizer's own state; its tensors go to where the parameters' shards are."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__("optimizer", optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("optimizer"):
            self.part.load_state_dict(placed_for(self.part, state["optimizer"]))


class _Model:
    """Its weights, by its own names: without what compile puts in front."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        state = own_state(self.model)
        return {
            "model": {name: value.detach() if isinstance(value, Tensor) else value for name, value in state.items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("model"):
            load_own_state(self.model, state["model"])


class _BesideModel:
    """Parameters that the optimizer holds and the model does not (a criterion's), with an open window's gradients."""

    def __init__(self, model: nn.Module, update: Update, window: Window) -> None:
        self.model, self.update, self.window = model, update, window

    def state_dict(self) -> dict[str, Any]:
        parameters = self.update.beside(self.model)
        return {
            "beside_model": [p.detach() for p in parameters],
            "beside_gradients": [] if self.window.empty else [p.grad for p in parameters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parameters = self.update.beside(self.model)
        for parameter, value in zip(parameters, state.get("beside_model", []), strict=False):
            parameter.detach().copy_(value)
        for parameter, gradient in zip(parameters, state.get("beside_gradients", []), strict=False):
            parameter.grad = gradient.to(parameter.device) if gradient is not None else None


class _OpenWindow:
    """What an unfinished window has left on the model: its gradients, and BatchNorm's statistics as it began."""

    def __init__(self, model: nn.Module, window: Window, statistics: Part) -> None:
        self.model, self.window, self.statistics = model, window, statistics

    def state_dict(self) -> dict[str, Any]:
        if self.window.empty:
            return {"gradients": {}, "kept_statistics": []}
        named = self.model.named_parameters()
        gradients = {own_name(n): p.grad.detach() for n, p in named if p.grad is not None}
        return {"gradients": gradients, **self.statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parameters = {own_name(name): parameter for name, parameter in self.model.named_parameters()}
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = placed_as(gradient.to(parameters[name].device), parameters[name])
        self.statistics.load_state_dict(state)


class _Settings:
    def __init__(self, config: AccelConfig) -> None:
        self.config = config

    def state_dict(self) -> dict[str, Any]:
        return {"config": self.config.given()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A resumed run has its own."""


class _Generators:
    def state_dict(self) -> dict[str, Any]:
        return {"random": random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back by the host, at the last moment."""
