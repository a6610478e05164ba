"""What is read in the frames of the Trainer's callers, and the host's function that each reading rests on.

These run at whatever transformers is installed: a host that renames one of these functions or locals fails here first.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from integrations.huggingface import frames, versions
from tests.huggingface.heads import HEADS, Rows, batch_for, model_for
from tests.huggingface.runs import arguments

HEAD = HEADS[0]

EVENTS = ("on_init_end", "on_train_begin", "on_epoch_begin", "on_pre_optimizer_step", "on_optimizer_step",
          "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")  # fmt: skip
LOCALS = ("train_dataloader", "resume_from_checkpoint", "epoch")


class Looks(TrainerCallback):
    """Keeps what `frames` finds from inside every event."""

    def __init__(self) -> None:
        self.owners: dict[str, Any] = {}
        self.locals: dict[str, Any] = {}

    def begin(self, trainer: Any, **more: Any) -> None:
        self.locals = {n: frames.caller_local(trainer, "_inner_training_loop", n) for n in LOCALS}


def _event(name: str) -> Any:
    def fired(self: Looks, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owners[name] = frames.find_trainer()
        if name == "on_epoch_begin":
            self.begin(self.owners[name])

    return fired


for _name in EVENTS:
    setattr(Looks, _name, _event(_name))


def built(folder: Path, callback: Any, **more: Any) -> Trainer:
    rows = Rows(batch_for(HEAD, 4, uneven=True))
    args = arguments(folder, per_device_train_batch_size=2, **more)
    return Trainer(model_for(HEAD), args, train_dataset=rows, eval_dataset=rows, callbacks=[callback])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Looks]:
    looks = Looks()
    every = {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 1}
    trainer = built(tmp_path_factory.mktemp("run"), looks, **every)
    trainer.train()
    return trainer, looks


@pytest.mark.parametrize("event", EVENTS)
def test_find_trainer_in_an_event_finds_the_trainer_that_fires_it(run: tuple[Trainer, Looks], event: str) -> None:
    """Rests on `CallbackHandler.call_event`: called by the Trainer's methods, in the same thread."""
    trainer, looks = run
    assert looks.owners[event] is trainer


def test_find_trainer_outside_a_trainer_finds_none() -> None:
    assert frames.find_trainer() is None


@pytest.mark.parametrize("name", LOCALS)
def test_caller_local_rests_on_a_local_of_inner_training_loop(name: str) -> None:
    """Rests on `Trainer._inner_training_loop`."""
    if name == "epoch" and versions.RUN_EPOCH.here:
        pytest.skip("read of a host without _run_epoch only")
    code = inspect.unwrap(Trainer._inner_training_loop).__code__
    assert name in (*code.co_varnames, *code.co_cellvars)


def test_caller_local_in_a_run_gives_the_loader_and_where_it_resumes(run: tuple[Trainer, Looks]) -> None:
    """Rests on `Trainer._inner_training_loop`, which every event of a run is below."""
    _, looks = run
    assert isinstance(looks.locals["train_dataloader"], DataLoader)
    assert looks.locals["resume_from_checkpoint"] is None
    assert looks.locals["epoch"] in (0, None)


def test_caller_local_of_another_trainer_or_function_is_none(run: tuple[Trainer, Looks]) -> None:
    trainer, _ = run
    train_dataloader = "a local of a test"
    assert frames.caller_local(trainer, "_inner_training_loop", "train_dataloader") is None
    assert train_dataloader


def test_adding_trainer_knows_the_trainer_whose_add_callback_runs(run: tuple[Trainer, Looks]) -> None:
    """Rests on `Trainer.add_callback`, which builds a callback that is given as a class."""
    trainer, _ = run
    found: list[Any] = []

    class Added(TrainerCallback):
        def __init__(self) -> None:
            found.append(frames.adding_trainer())

    trainer.add_callback(Added)
    trainer.remove_callback(Added)
    assert found == [trainer]


def test_adding_trainer_of_a_trainer_that_is_still_built_is_none(tmp_path: Path) -> None:
    """Rests on `Trainer.__init__`: `state` comes after the callbacks of its argument were built."""
    found: list[Any] = []

    class Given(TrainerCallback):
        def __init__(self) -> None:
            found.append(frames.adding_trainer())

    built(tmp_path, Given)
    assert found == [None]


def test_a_host_class_is_a_trainer_and_its_parts_are_none(run: tuple[Trainer, Looks]) -> None:
    trainer, _ = run
    assert frames.is_trainer(trainer)
    assert not any(map(frames.is_trainer, (None, trainer.model, trainer.args, trainer.callback_handler)))
