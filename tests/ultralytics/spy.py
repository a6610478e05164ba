"""What a run's updates were made of, and the big batch's gradients beside them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics import RTDETR, YOLO
from ultralytics.cfg import get_cfg
from ultralytics.utils import DEFAULT_CFG

from tests import reference


@dataclass
class Seen:
    """What was seen at one `optimizer.step`."""

    gradients: dict[str, Tensor]
    batches: list[dict[str, Any]]
    model: nn.Module
    rates: list[float]
    decays: list[float]

    def off(self) -> float:
        return off_the_big_batch(self.gradients, self.model, self.batches)


class Spy:
    """Sees every micro-batch and every `optimizer.step`. With `heavy`, keeps batches and a copy of the model."""

    def __init__(self, heavy: bool = False) -> None:
        self.heavy = heavy
        self.updates: list[Seen] = []
        self.sizes: list[int] = []
        self.model: Any = None
        self._weights: tuple[float, ...] = ()
        self._batches: list[dict[str, Any]] = []

    def hold(self, trainer: Any) -> None:
        self.model = trainer.model
        if self.heavy:
            settle(trainer.model)
        through = trainer.model.loss

        def spied_loss(batch: dict[str, Any], preds: Any = None) -> Any:
            self.sizes.append(len(batch["img"]))
            self._weights = head_weights(self.model)
            self._batches.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()})
            return through(batch, preds)

        trainer.model.loss = spied_loss
        step = trainer.optimizer.step
        names = {id(p): n for n, p in trainer.model.named_parameters()}

        def spied_step(*args: Any, **kwargs: Any) -> Any:
            groups = trainer.optimizer.param_groups
            gradients = {
                names[id(p)]: p.grad.detach().clone() for g in groups for p in g["params"] if p.grad is not None
            }
            self.updates.append(
                Seen(
                    gradients,
                    self._batches if self.heavy else [],
                    self._bare() if self.heavy else nn.Identity(),
                    [g["lr"] for g in groups],
                    [g["weight_decay"] for g in groups],
                )
            )
            self._batches = []
            return step(*args, **kwargs)

        spied_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # `time=` builds a scheduler every epoch
        trainer.optimizer.step = spied_step

    def _bare(self) -> nn.Module:
        """As it was in the window: a window that ends with its epoch closes after the criterion has moved on."""
        model: Any = bare(self.model)
        if self._weights:
            model.criterion = model.init_criterion()
            model.criterion.o2m, model.criterion.o2o = self._weights
        return model  # type: ignore[no-any-return]

    @property
    def norms(self) -> list[float]:
        return [float(torch.cat([g.flatten() for g in u.gradients.values()]).norm()) for u in self.updates]


def bare(model: nn.Module) -> nn.Module:
    """A copy of a live model without anything that was put on it: the host's own loss and criterion."""
    model = copy.deepcopy(model)
    model.__dict__.pop("loss", None)
    model.criterion = None  # type: ignore[assignment]
    return model


def head_weights(model: Any) -> tuple[float, ...]:
    """The weights of the two losses of an end-to-end criterion, which change every epoch."""
    criterion = getattr(model, "criterion", None)
    return (criterion.o2m, criterion.o2o) if hasattr(criterion, "o2m") else ()


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    total: Tensor = model.loss({**batch})[0].sum()  # type: ignore[operator]
    return total


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The micro-batches as one batch: image indices of the labels go on counting."""
    found: dict[str, Any] = {}
    for key, first in batches[0].items():
        if not isinstance(first, Tensor):
            continue
        values = [b[key] for b in batches]
        if key == "batch_idx":
            starts = torch.tensor([0, *(len(b["img"]) for b in batches[:-1])]).cumsum(0)
            values = [v + s for v, s in zip(values, starts, strict=True)]
        found[key] = torch.cat(values)
    return found


def network(path: Path, seed: int = 0) -> nn.Module:
    """The live model of a yaml as its trainer would hold it, BatchNorm's statistics settled.

    (With those of a fresh model, activations fade and one big batch in fp32 is itself 1e-6 away from fp64.)
    """
    torch.manual_seed(seed)
    model: nn.Module = (RTDETR if "rtdetr" in path.name else YOLO)(str(path)).model  # type: ignore[assignment]
    model.args, model.nc = get_cfg(DEFAULT_CFG), 3  # type: ignore[assignment]
    settle(model)
    return model


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Move BatchNorm's statistics to where a trained network has them; no global random number is drawn."""
    generator = torch.Generator().manual_seed(0)
    modes = [(m, m.training) for m in model.modules()]
    model.train()
    for _ in range(30):
        model(torch.rand(4, 3, 64, 64, generator=generator))
    for module, training in modes:
        module.training = training


def off_the_big_batch(
    ours: dict[str, Tensor], model: nn.Module, batches: list[dict[str, Any]], limit: float = 1e-6
) -> float:
    """The relative difference from the gradients of one big batch, by the slow reference.

    One big batch in fp32 may itself be more than `limit` away from fp64. Where ours is nearer to fp64 than it, the
    distance from fp64 counts.
    """
    weights = head_weights(model)
    right = reference.gradients(model, joined(batches), loss)
    off = reference.difference(ours, right)
    if off > limit:
        exact = in_double(model, batches, weights)
        ours_off, right_off = (reference.difference(g, exact) for g in (ours, right))
        off = min(off, ours_off) if ours_off <= right_off else off
    return off


def in_double(model: nn.Module, batches: list[dict[str, Any]], weights: tuple[float, ...]) -> dict[str, Tensor]:
    """The big batch's gradients in fp64. (The host's criteria build their tensors in the default dtype.)"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        big = {k: v.double() if v.is_floating_point() else v for k, v in joined(batches).items()}
        double: Any = bare(model).double()
        if weights:
            double.criterion = double.init_criterion()
            double.criterion.o2m, double.criterion.o2o = weights
        return reference.gradients(double, big, loss)
    finally:
        torch.set_default_dtype(before)


class NoSpy:
    """A spy puts a function of its own on the model, which cannot be pickled: with the host alone neither."""

    def hold(self, trainer: Any) -> None: ...
