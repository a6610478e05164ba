"""A step of the user's own, and what callbacks change of it: once per update, with the window's gradients.

The cases are of public reports, see tests/cases.md.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from ultralytics.models.yolo.detect import DetectionTrainer

from tests.ultralytics.conftest import Train, same, tensors
from tests.ultralytics.spy import NoSpy


class Stepping(DetectionTrainer):
    """A user's own step that adds something and goes on to the host's."""

    ran = 0

    def optimizer_step(self) -> None:
        type(self).ran += 1
        super().optimizer_step()


class Whole(DetectionTrainer):
    """A user's own step that is all of it, with a clip value of its own."""

    ran = 0

    def optimizer_step(self) -> None:
        type(self).ran += 1
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.01)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update(self.model)


@pytest.mark.parametrize(("own", "clip"), [(Stepping, "host"), (Whole, 0.01)])
def test_24320_an_own_optimizer_step_runs_once_per_update_on_the_window_s_gradients(
    own: Any, clip: Any, train: Train
) -> None:
    own.ran = 0
    options = {"accumulate": 2, "batchnorm": "freeze"}
    theirs = train(accel=options, images=20, epochs=2, trainer=own)
    ours = train(accel={**options, "clip_norm": clip}, images=20, epochs=2, name="ours")
    assert own.ran == len(theirs.spy.updates) == 5
    assert theirs.report["window"]["updates"] == 5
    assert theirs.trainer.ema.updates == 5
    for name, tensor in ours.weights.items():
        assert torch.allclose(theirs.weights[name], tensor, rtol=1e-6, atol=1e-8), name


def test_an_own_optimizer_step_is_not_run_for_a_skipped_update(train: Train) -> None:
    Stepping.ran = 0

    def spoil(trainer: Any) -> None:
        session = trainer.accel.session
        if session.updates == 1 and session.window.micro_batches == 1:  # the second window is half full
            next(p for p in trainer.model.parameters() if p.grad is not None).grad[:] = float("nan")

    run = train(accel={"accumulate": 2}, images=16, epochs=2, trainer=Stepping, callbacks={"on_train_batch_end": spoil})
    assert run.report["window"]["skipped_updates"] == 1
    assert Stepping.ran == run.report["window"]["updates"] == 3
    assert all(bool(t.isfinite().all()) for t in run.weights.values())


@pytest.mark.parametrize("event", ["on_pretrain_routine_end", "on_train_start", "on_train_epoch_start"])
def test_an_optimizer_step_that_a_callback_puts_on_the_trainer_runs_once_per_update(event: str, train: Train) -> None:
    ran: list[int] = []

    def wrap(trainer: Any) -> None:
        through = trainer.optimizer_step
        trainer.optimizer_step = lambda: (ran.append(1), through())[1]

    run = train(accel={"accumulate": 2}, images=8, epochs=1, callbacks={event: wrap})
    assert len(ran) == len(run.spy.updates) == 1


def test_an_optimizer_that_a_callback_puts_on_the_trainer_is_the_one_that_steps(train: Train) -> None:
    kept: list[Any] = []
    steps: list[int] = []

    def exchange(trainer: Any) -> None:
        kept.append(tensors(trainer.model))
        head = [p for n, p in trainer.model.named_parameters() if n.startswith("model.6") and p.requires_grad]
        trainer.optimizer = torch.optim.AdamW(head, lr=1e-2)
        for group in trainer.optimizer.param_groups:
            group["initial_lr"] = 1e-2
        trainer.optimizer.register_step_post_hook(lambda *_: steps.append(1))

    run = train(accel={"accumulate": 2}, images=16, callbacks={"on_train_start": exchange}, spy=NoSpy())
    assert len(steps) == 2
    names = [n for n, _ in run.trainer.model.named_parameters() if not torch.equal(kept[0][n], run.weights[n])]
    assert names
    assert all(n.startswith("model.6") for n in names)


def test_parameters_that_a_callback_exchanges_in_an_end_to_end_model_keep_the_exact_gradient(train: Train) -> None:
    """As pruning does: other parameters in the same model, and an optimizer of theirs."""

    def exchange(trainer: Any, clone: bool) -> None:
        for module in trainer.model.modules() if clone else ():
            if isinstance(module, torch.nn.Conv2d) and module.weight.requires_grad:
                module.weight = torch.nn.Parameter(module.weight.detach().clone())
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01, momentum=0.9)
        for group in trainer.optimizer.param_groups:
            group["initial_lr"] = 0.01

    runs = [
        train(
            "end2end", accel={"accumulate": 2}, images=8, epochs=2, name=str(clone), spy=NoSpy(),
            callbacks={"on_train_start": lambda trainer, clone=clone: exchange(trainer, clone)},
        )
        for clone in (False, True)
    ]  # fmt: skip
    for name, right in runs[0].weights.items():  # the norm is summed in another order
        torch.testing.assert_close(runs[1].weights[name], right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("accel", "updates"), [({}, 2), ({"accumulate": 4}, 1)])
def test_an_accumulate_that_a_callback_sets_after_warm_up_closes_the_windows(
    accel: dict[str, Any], updates: int, train: Train
) -> None:
    def choose(trainer: Any) -> None:
        trainer.accumulate = 2

    run = train(accel=accel, images=16, nbs=4, callbacks={"on_train_start": choose})
    assert len(run.spy.updates) == updates
    told = [line for line in run.report["warnings"] if line.startswith("trainer.accumulate=2: set by a callback")]
    assert len(told) == (1 if accel else 0)


def test_an_accumulate_that_a_callback_sets_within_warm_up_is_the_host_s_to_overrule(train: Train) -> None:
    def choose(trainer: Any) -> None:
        trainer.accumulate = 2

    callbacks = {"on_train_start": choose}
    runs = [
        train(accel=a, images=8, nbs=4, epochs=3, warmup_epochs=1, callbacks=callbacks, name=str(a)) for a in (None, {})
    ]
    assert [len(run.spy.updates) for run in runs] == [6, 6]
    assert same(runs[0].weights, runs[1].weights)


def test_a_parameter_frozen_in_the_middle_of_a_window_does_not_move(train: Train) -> None:
    kept: list[Tensor] = []

    def freeze(trainer: Any) -> None:
        if not kept:
            parameter = next(trainer.model.parameters())
            assert parameter.grad is not None
            parameter.requires_grad_(False)
            kept.append(parameter.detach().clone())

    run = train(accel={"accumulate": 4}, images=16, callbacks={"on_train_batch_end": freeze})
    assert len(run.spy.updates) == 1
    assert torch.equal(next(run.trainer.model.parameters()), kept[0])


def test_a_preprocess_batch_that_a_callback_puts_on_the_trainer_runs_once_per_batch(train: Train) -> None:
    seen: list[int] = []

    def replace(trainer: Any) -> None:
        def own(batch: dict[str, Any]) -> dict[str, Any]:
            seen.append(len(batch["img"]))
            return {**batch, "img": batch["img"].float() / 255}

        trainer.preprocess_batch = own

    run = train(accel={"accumulate": 2}, images=16, callbacks={"on_train_start": replace})
    assert seen == [4, 4, 4, 4]
    assert len(run.spy.updates) == run.report["window"]["updates"] == 2


def test_another_model_put_on_the_trainer_in_the_run_is_refused_in_one_line(train: Train) -> None:
    def exchange(trainer: Any) -> None:
        trainer.model = copy.deepcopy(trainer.model)

    with pytest.raises(ValueError, match=r"^trainer\.model: a callback put another model there[^\n]*$"):
        train(accel={}, images=8, callbacks={"on_train_epoch_start": exchange}, spy=NoSpy())
