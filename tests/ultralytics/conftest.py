"""Tiny data, tiny models and short runs of the real trainer; spies on its updates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from ultralytics import RTDETR, YOLO
from ultralytics.utils import DEFAULT_CFG

from examples import shapes
from plugins.yolo import attach
from tests.ultralytics.spy import Spy

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


def without_plug(*arguments: str, cwd: Path, path: str = "") -> Any:
    """A Python process that cannot import the project."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")}
    environment.update(PYTHONPATH=path, YOLO_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The host's criteria build their tensors in the default dtype."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; path, arguments and imported modules are put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "argv", ["yolo"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
