"""Thousands of updates with validations among them: nothing grows, and at the end nothing of ours is left on a host."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from plugins.loop import Accelerated
from tests.trust.strategies import sizes

SLOPE = 0.1 * 2**20  # bytes an update
WARM_UP = 0.25  # of the updates, in which caches fill


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


def hooks_of(model: nn.Module) -> int:
    """All hooks on modules and parameters, and what stands on instances beside what the class made."""
    names = [name for name in vars(nn.Module()) if "hooks" in name]
    return sum(
        len(getattr(module, name)) for module in model.modules() for name in names
    ) + sum(len(p._backward_hooks or ()) for p in model.parameters())  # fmt: skip


def standing(model: nn.Module) -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "children": len(process.children(recursive=True)),
        "python threads": threading.active_count(),
        "hooks": hooks_of(model),
        "tensors": sum(isinstance(one, torch.Tensor) for one in gc.get_objects()),
    }


def slope(memory: list[int], every: int) -> float:
    """Bytes an update, by least squares over what follows the warm-up."""
    kept = memory[int(len(memory) * WARM_UP) :]
    middle = (len(kept) - 1) / 2
    mean = sum(kept) / len(kept)
    along = sum((i - middle) * (m - mean) for i, m in enumerate(kept))
    return along / sum((i - middle) ** 2 for i in range(len(kept))) / every


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("compile_", ["off", "on"])
@sizes(200, 2000)
def test_a_loop_grows_in_nothing(count: int, compile_: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 4))
    before, hooks = attributes(model), hooks_of(model)
    accel = Accelerated(
        model, torch.optim.AdamW(model.parameters()), micro_batch=8, accumulate=2, ema=0.9, clip_norm=1.0, plan="off",
        compile=compile_, compile_backend="eager", say=lambda line: None,
    )  # fmt: skip
    memory: list[int] = []
    first: dict[str, int] = {}
    accel.train()
    while accel.updates < count:
        accel.training_step(lambda x: model(x).square().mean(), torch.randn(8, 16))
        if accel.updates % 50 == 0 and accel.session.window.empty:
            with accel.validation() as held, torch.no_grad():
                held(torch.randn(8, 16))
            accel.save(tmp_path / "last.pt")
            memory.append(psutil.Process().memory_info().rss)
            if len(memory) == 2:
                first = standing(model)
    last, graphs = standing(model), accel.session.report.compile.graphs
    assert {name: n for name, n in last.items() if n > first[name]} == {}
    assert graphs <= (2 if compile_ == "on" else 0)
    if count >= 1000:
        assert slope(memory, 50) < SLOPE
    accel.end(tmp_path)
    assert attributes(model) == before
    assert hooks_of(model) == hooks


def ours(objects: list[Any]) -> list[str]:
    """Names of live objects of ours that hold a run: sessions, adapters, windows."""
    kinds = ("plugins.core.session", "integrations.ultralytics.adapter", "integrations.huggingface.adapter")
    return sorted({type(one).__qualname__ for one in objects if type(one).__module__ in kinds})


@pytest.mark.parametrize("how", ["end", "error"])
def test_nothing_of_ours_is_left_on_a_trainer(how: str, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from plugins.hf import AccelCallback
    from tests.huggingface.runs import trainer_for

    class Fails(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if how == "error":
                raise RuntimeError("a user's own")

    trainer, _ = trainer_for("bert-token", tmp_path, 16, plug=False, num_train_epochs=1, per_device_train_batch_size=4)
    instance, model = set(vars(trainer)), attributes(trainer.model)
    trainer.add_callback(Fails)
    trainer.add_callback(AccelCallback(plan="off", compile="off", ema=0.9))
    if how == "error":
        with pytest.raises(RuntimeError, match="a user's own"):
            trainer.train()
    else:
        trainer.train()
    plug = next(c for c in trainer.callback_handler.callbacks if isinstance(c, AccelCallback))
    plug.detach()
    names = {name for name in set(vars(trainer)) - instance if "plugins" in type(getattr(trainer, name)).__module__}
    assert names == set()
    held = {name: found - model[name] for name, found in attributes(trainer.model).items() if found - model[name]}
    assert not {name for some in held.values() for name in some if name.startswith("accel") or name == "forward"}
    assert hooks_of(trainer.model) == 0


@pytest.mark.parametrize("how", ["end", "error"])
def test_nothing_of_ours_is_left_on_an_ultralytics_trainer(how: str, tmp_path: Path) -> None:
    from ultralytics import YOLO

    from plugins.yolo import attach
    from tests.ultralytics.conftest import PLAIN, write_data, write_model

    model = YOLO(str(write_model(tmp_path, "detect")))
    attach(model, plan="off", compile="off", accumulate=2)

    def fails(trainer: Any) -> None:
        if how == "error":
            raise RuntimeError("a user's own")

    model.add_callback("on_train_batch_end", fails)
    arguments = {"data": str(write_data(tmp_path / "data", train=8, val=2)), "epochs": 1, "batch": 4, "imgsz": 64,
                 "plots": False, "workers": 0, "project": str(tmp_path), "name": "run", **PLAIN}  # fmt: skip
    if how == "error":
        with pytest.raises(RuntimeError, match="a user's own"):
            model.train(**arguments)
    else:
        model.train(**arguments)
    trainer = model.trainer
    held = [f"{name}: {type(value)}" for name, value in vars(trainer).items()
            if type(value).__module__.startswith(("plugins", "integrations"))]  # fmt: skip
    assert held == []
    assert trainer.accel is None
    assert hooks_of(trainer.model) == 0
    own = {name for module in trainer.model.modules() for name in vars(module) if callable(vars(module)[name])}
    assert not {name for name in own if "plugins" in str(getattr(trainer.model, name, "")) or "accel" in name}
    gc.collect()
    assert ours(gc.get_referrers(trainer.model, trainer)) == []
