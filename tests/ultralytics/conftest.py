"""Tiny data, tiny models and short runs of the real trainer; spies on its updates."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from ultralytics import RTDETR, YOLO
from ultralytics.cfg import get_cfg
from ultralytics.utils import DEFAULT_CFG

from examples import shapes
from plugins.yolo import attach
from tests import reference

ROOT = Path(__file__).parents[2]
BATCHNORM = nn.modules.batchnorm._BatchNorm

# A yolov8-like network of 12 convolutions, strides 8, 16 and 32, and a head for every task.
BACKBONE = [
    [-1, 1, "Conv", [8, 3, 2]],
    [-1, 1, "Conv", [8, 3, 2]],
    [-1, 1, "C2f", [8, True]],
    [-1, 1, "Conv", [16, 3, 2]],
    [-1, 1, "Conv", [16, 3, 2]],
    [-1, 1, "Conv", [16, 3, 2]],
]
HEADS: dict[str, dict[str, Any]] = {
    "detect": {"head": [[[3, 4, 5], 1, "Detect", ["nc"]]]},
    "end2end": {"head": [[[3, 4, 5], 1, "Detect", ["nc"]]], "end2end": True, "reg_max": 1},
    "segment": {"head": [[[3, 4, 5], 1, "Segment", ["nc", 4, 8]]]},
    "pose": {"head": [[[3, 4, 5], 1, "Pose", ["nc", [1, 3]]]], "kpt_shape": [1, 3]},
    "obb": {"head": [[[3, 4, 5], 1, "OBB", ["nc", 1]]]},
    "classify": {"head": [[-1, 1, "Classify", ["nc"]]]},
    "rtdetr": {"head": [[[3, 4, 5], 1, "RTDETRDecoder", ["nc", 16, 20, 4, 2, 1, 32]]]},
}
SHAPES = {"end2end": "detect", "rtdetr": "detect"}

# Every random change of an image off: two runs see the same pixels in the same order.
PLAIN = {
    "mosaic": 0.0,
    "hsv_h": 0.0,
    "hsv_s": 0.0,
    "hsv_v": 0.0,
    "translate": 0.0,
    "scale": 0.0,
    "fliplr": 0.0,
    "erasing": 0.0,
    "auto_augment": None,
}


def write_model(folder: Path, head: str) -> Path:
    path = folder / f"tiny-{head}.yaml"
    path.write_text(yaml.safe_dump({"nc": 3, "backbone": BACKBONE, **HEADS[head]}))
    return path


def write_data(folder: Path, train: int = 16, val: int = 4, task: str = "detect", empty: Iterable[int] = ()) -> Path:
    """A data set of `train` images of 64 px; those listed in `empty` have no object."""
    data = shapes.write(folder, train=train, val=val, size=64, task=task)
    for index in empty:
        (folder / "labels" / "train" / f"{index:04}.txt").write_text("")
    return data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`data(train, task, empty)`: the path of a data set, written once a session."""
    made: dict[Any, Path] = {}

    def get(train: int = 16, task: str = "detect", empty: tuple[int, ...] = (), val: int = 4) -> Path:
        key = (train, task, empty, val)
        if key not in made:
            made[key] = write_data(tmp_path_factory.mktemp("data"), train, val, task, empty)
        return made[key]

    return get


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda head: write_model(folder, head)


@dataclass
class Run:
    """One finished run: its trainer, the spy on its updates, its folder."""

    trainer: Any
    spy: Spy
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        import json

        return dict(json.loads((self.folder / "accel_report.json").read_text()))

    @property
    def weights(self) -> dict[str, Tensor]:
        return tensors(self.trainer.model)

    @property
    def average(self) -> dict[str, Tensor]:
        return tensors(self.trainer.ema.ema)


Train = Callable[..., Run]


@pytest.fixture
def train(
    tmp_path: Path, data: Callable[..., Path], models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """`train(head, accel={...} or None for the host alone, callbacks={event: function}, **host arguments)`.

    The speed plan measures, and what it measures on a busy machine may differ from run to run: it is off by default.
    """
    monkeypatch.chdir(tmp_path)

    def run(
        head: str = "detect",
        accel: dict[str, Any] | None = None,
        callbacks: dict[str, Callable[[Any], None]] | None = None,
        images: int = 16,
        empty: tuple[int, ...] = (),
        name: str = "run",
        resume: Path | None = None,
        model: Path | None = None,
        trainer: Any = None,
        spy: Spy | None = None,
        **host: Any,
    ) -> Run:
        found = (RTDETR if head == "rtdetr" else YOLO)(str(resume or model or models(head)))
        if accel is not None:
            attach(found, **{"plan": "off", **accel})
        spy = spy or Spy()
        found.add_callback("on_train_start", spy.hold)
        for event, function in (callbacks or {}).items():
            found.add_callback(event, function)
        if resume is not None:
            arguments: dict[str, Any] = {"resume": True, **host}
        else:
            arguments = {
                "data": str(data(images, SHAPES.get(head, head), empty)),
                "epochs": 1,
                "batch": 4,
                "imgsz": 64,
                "warmup_epochs": 0,
                "optimizer": "SGD",
                "plots": False,
                "val": False,
                "workers": 0,
                "project": str(tmp_path),
                "name": name,
                **PLAIN,
                **host,
            }
        if isinstance(DEFAULT_CFG.multi_scale, bool) and "multi_scale" in arguments:  # an older host's range is fixed
            arguments["multi_scale"] = bool(arguments["multi_scale"])
        found.train(trainer=trainer, **arguments)
        return Run(found.trainer, spy, Path(found.trainer.save_dir))

    return run


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


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same(ours: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return ours.keys() == right.keys() and all(torch.equal(ours[n], right[n]) for n in right)


def freeze_batchnorm(trainer: Any) -> None:
    """`on_train_batch_start` of a host alone, whose runs are compared with `batchnorm=freeze`."""
    for module in trainer.model.modules():
        if isinstance(module, BATCHNORM):
            module.eval()


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


def without_plug(*arguments: str, cwd: Path, path: str = "") -> Any:
    """A Python process that cannot import the project."""
    import subprocess
    import sys

    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
    environment.update(PYTHONPATH=path, YOLO_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
