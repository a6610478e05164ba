"""What users wrote themselves, beside the plug: each runs as often as the host alone would run it, and no more.

The cases are of public reports, see tests/cases.md.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.loss import v8DetectionLoss
from ultralytics.utils.torch_utils import ModelEMA

from integrations.patches import Hook, nothing
from integrations.ultralytics import command
from plugins import yolo
from plugins.yolo import attach
from tests.ultralytics.conftest import Run, Train, same, tensors, without_plug
from tests.ultralytics.saved import Killed, keep_copies, stop_after
from tests.ultralytics.spy import NoSpy

EVENTS = (
    "on_pretrain_routine_end", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
    "on_train_epoch_end", "on_model_save", "on_fit_epoch_end", "on_train_end", "teardown",
)  # fmt: skip


# -- copies of the model --------------------------------------------------------------------------------------------


def test_10273_copies_of_the_live_model_are_the_host_s_at_every_event(train: Train) -> None:
    tried: list[str] = []

    def copies(event: str, trainer: Any) -> None:
        model, buffer = trainer.model, io.BytesIO()
        torch.save(model, buffer)
        made = [
            copy.deepcopy(model),
            copy.copy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=False),
            torch.optim.swa_utils.AveragedModel(model).module,
            ModelEMA(model).ema,
        ]
        assert b"integrations" not in buffer.getvalue()
        for one in made:
            assert not {"loss", "__getstate__"} & vars(one).keys()
            assert one.loss.__self__ is one
        for one in (m for m in made if m.criterion is not model.criterion):  # a shallow copy shares it
            assert "loss" not in vars(one.criterion)
            assert "forward" not in vars(one.criterion.assigner)
        assert same(tensors(made[0]), tensors(model))
        tried.append(event)

    functions = {event: (lambda trainer, event=event: copies(event, trainer)) for event in EVENTS}
    train(accel={"accumulate": 2}, images=8, callbacks=functions, spy=NoSpy())
    assert set(tried) == set(EVENTS)


def test_copies_of_the_trainer_and_its_validator_are_without_the_plug_s_run(train: Train) -> None:
    """The callbacks of a run hold its trainer, whose loss can no more be copied: a validator's copy goes without."""
    made: list[Any] = []

    def copies_trainer(trainer: Any) -> None:
        made.append(copy.deepcopy(trainer))

    def copies_validator(trainer: Any) -> None:
        trainer.validator.callbacks = trainer.callbacks
        made.append(copy.deepcopy(trainer.validator))
        pickle.loads(pickle.dumps([f for f in trainer.callbacks["on_train_batch_end"] if isinstance(f, Hook)]))

    callbacks = {"on_train_start": copies_trainer, "on_train_epoch_end": copies_validator}
    assert train(accel={"accumulate": 2}, images=8, callbacks=callbacks, spy=NoSpy()).report["window"]["updates"] == 1
    trainer = made[0]
    assert trainer.accel is None
    assert "optimizer_step" not in vars(trainer)
    for owner in made:
        assert nothing in owner.callbacks["on_train_batch_start"]
        assert not any(isinstance(f, Hook) for functions in owner.callbacks.values() for f in functions)


LOADS = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)["live"]
assert not any(name.split(".")[0] in ("plugins", "integrations") for name in sys.modules)
assert model(torch.rand(1, 3, 64, 64)) is not None
print("loads")
"""


def test_147_an_own_save_model_that_copies_the_model_is_loaded_without_the_plug_and_resumed(
    train: Train, tmp_path: Path
) -> None:
    """Torch-Pruning's recipe, put there by a callback."""
    saves: list[int] = []

    def killed(trainer: Any) -> None:
        keep_copies(trainer)
        stop_after(1)["on_fit_epoch_end"](trainer)

    def replace(trainer: Any) -> None:
        def save_model(self: Any) -> bool:
            saves.append(self.epoch)
            ema = copy.deepcopy(self.ema.ema)
            found = {"epoch": self.epoch, "best_fitness": self.best_fitness, "model": None, "ema": ema}
            found |= {"updates": self.ema.updates, "live": copy.deepcopy(self.model), "train_args": vars(self.args)}
            torch.save({**found, "optimizer": self.optimizer.state_dict()}, self.last)
            return True

        trainer.save_model = types.MethodType(save_model, trainer)

    with pytest.raises(Killed):
        train(
            accel={"accumulate": 3}, images=16, epochs=3, spy=NoSpy(),
            callbacks={"on_train_start": replace, "on_fit_epoch_end": killed},
        )  # fmt: skip
    assert saves == [0, 1]
    done = without_plug("-c", LOADS, "after1/weights/last.pt", cwd=tmp_path)
    assert done.stdout.strip().endswith("loads"), done.stderr
    assert len(list(Path("after1/weights").glob("last.*.accel"))) == 1
    last = Path("after1/weights/last.pt").resolve()
    live = tensors(torch.load(last, weights_only=False)["live"])
    began: list[dict[str, Tensor]] = []
    train(accel={}, resume=last, callbacks={"on_train_start": lambda t: began.append(tensors(t.model))}, spy=NoSpy())
    assert same(began[0], live)


# -- resume ---------------------------------------------------------------------------------------------------------


class Weighted(DetectionTrainer):
    """A user's own loader: torch's, with a sampler of its own, which has no `reset`."""

    drawn: list[str] = []

    def get_dataloader(self, dataset_path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Any:
        host = super().get_dataloader(dataset_path, batch_size, rank, mode)
        if mode != "train":
            return host
        draw = torch.Generator().manual_seed(5)
        sampler = WeightedRandomSampler(torch.ones(len(host.dataset)), len(host.dataset), generator=draw)
        collate = host.collate_fn
        generator = torch.Generator().manual_seed(6)
        return DataLoader(host.dataset, batch_size, sampler=sampler, collate_fn=collate, generator=generator)

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.drawn.extend(Path(p).name for p in batch["im_file"])
        return super().preprocess_batch(batch)


def test_a_run_with_an_own_loader_resumes_with_the_images_of_the_straight_run(train: Train) -> None:
    options: dict[str, Any] = {"images": 12, "epochs": 3, "close_mosaic": 0, "trainer": Weighted}
    Weighted.drawn = []
    straight = train(accel={"accumulate": 2}, callbacks={"on_fit_epoch_end": keep_copies}, **options)
    right = Weighted.drawn[24:]
    Weighted.drawn = []
    resumed = train(
        accel={},
        resume=Path("after1/weights/last.pt").resolve(),
        trainer=Weighted,
        save_dir=str(Path("after1").resolve()),
    )
    assert Weighted.drawn == right
    assert same(resumed.weights, straight.weights)


@pytest.mark.parametrize("event", ["on_pretrain_routine_end", "on_train_start", "on_train_epoch_start"])
def test_what_callbacks_set_on_a_resume_is_not_taken_back(event: str, train: Train) -> None:
    with pytest.raises(Killed):
        train(accel={"accumulate": 2}, images=8, epochs=2, callbacks=stop_after(0))
    at_first_batch: list[tuple[float, float]] = []

    def change(trainer: Any) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(0.25)
        for group in trainer.optimizer.param_groups:
            group["weight_decay"], group["momentum"] = 0.125, 0.5

    def look(trainer: Any) -> None:
        group = trainer.optimizer.param_groups[0]
        found = {float(v) for v in next(trainer.model.parameters()).detach().unique()}
        assert found == {0.25}
        at_first_batch.append((group["weight_decay"], group["momentum"]))

    functions = {event: change, "on_train_batch_start": look}
    model_of = Path("run/weights/last.pt").resolve()
    train(accel={"accumulate": 2}, resume=model_of, callbacks=functions, spy=NoSpy())
    assert at_first_batch[0] == (0.125, 0.5)


def test_the_plug_takes_hold_before_users_callbacks_by_attach_and_by_the_command(
    models: Callable[[str], Path],
) -> None:
    """So that a resumed run's state is put back before they set theirs."""
    event = "on_pretrain_routine_end"
    model = YOLO(str(models("detect")))
    model.add_callback(event, print)
    assert attach(model).callbacks[event][0].func is yolo.start
    with command.on_every_model({event: [print, yolo.configure({})[event]]}):
        listed = YOLO(str(models("detect"))).callbacks[event]
    assert listed[0].func is yolo.start
    assert listed[-1] is print


class Running(torch.nn.Module):
    """A criterion with a memory of its own, as WIoU's running mean."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = v8DetectionLoss(model)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, preds: Any, batch: Any) -> Any:
        value, items = self.inner(preds, batch)
        self.mean.mul_(0.5).add_(0.5 * value.detach().sum())
        return value / self.mean, items


def test_modules_that_a_callback_puts_on_the_model_are_resumed(train: Train) -> None:
    """A teacher, a criterion: the host's own checkpoint has neither, so that it resumes without them."""
    given: list[bool] = []

    def put(trainer: Any) -> None:
        given.append(trainer.resume)
        trainer.model.teacher = copy.deepcopy(trainer.ema.ema)
        trainer.model.criterion = Running(trainer.model)

    callbacks = {"on_train_start": put, "on_fit_epoch_end": keep_copies}
    straight = train(accel={"accumulate": 2}, images=12, epochs=2, callbacks=callbacks, spy=NoSpy())
    shutil.copytree("after0", "without")

    def resume(folder: str, **callbacks: Any) -> Run:
        last = Path(folder, "weights", "last.pt").resolve()
        return train(accel={}, resume=last, save_dir=str(last.parents[1]), callbacks=callbacks, spy=NoSpy())

    resumed = resume("after0", on_train_start=put)
    assert given == [False, True]
    assert same(resumed.weights, straight.weights)
    assert {"criterion.mean", "teacher.model.0.conv.weight"} <= resumed.weights.keys()
    warnings = resume("without").report["warnings"]
    assert any(re.match(r"no place in the model for \d+ tensors .* such as teacher\.", line) for line in warnings)


# -- tune -----------------------------------------------------------------------------------------------------------


def test_tune_says_that_it_trains_without_the_plug(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(YOLO, "tune", lambda self, *args, **kwargs: asked.append((args, kwargs)))
    with caplog.at_level(logging.WARNING, "ultralytics"):
        attach(YOLO(str(models("detect")))).tune(iterations=2, data="x.yaml")
    assert asked == [((False,), {"iterations": 2, "data": "x.yaml"})]
    (line,) = [r.message for r in caplog.records if "accel" in r.message]
    assert "trainings run without plugins.yolo" in line
