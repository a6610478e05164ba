"""Trainers of the user's own: their optimizers, their batches, their second forward. See tests/cases.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from ultralytics.models.yolo.detect import DetectionTrainer

from integrations.ultralytics.versions import GROUP_NAMES
from tests.ultralytics.conftest import Train, freeze_batchnorm, same
from tests.ultralytics.spy import NoSpy

OWN_DECAY = 0.05


class PerLayer(DetectionTrainer):
    """24419: the recipe of the host's own guide, whose groups have no names."""

    def build_optimizer(self, model: nn.Module, *_: Any, lr: float = 1e-3, decay: float = 1e-5, **__: Any) -> Any:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        backbone = [p for n, p in named if n.startswith(("model.0.", "model.1."))]
        head = [p for n, p in named if not n.startswith(("model.0.", "model.1."))]
        return torch.optim.AdamW(
            [{"params": backbone, "lr": lr * 0.1, "weight_decay": decay}, {"params": head, "lr": lr}],
            weight_decay=OWN_DECAY if GROUP_NAMES.here else decay,  # an older host's groups cannot be told apart
        )


class Bare(torch.optim.Rprop):
    """Without a weight decay, and with a `zero_grad` that takes nothing."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


class WithBare(DetectionTrainer):
    def build_optimizer(self, model: nn.Module, *_: Any, **__: Any) -> Any:
        return Bare([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.parametrize("trainer", [PerLayer, WithBare])
def test_24419_an_own_optimizer_warms_up_and_decays_as_by_the_host(trainer: Any, train: Train) -> None:
    options: dict[str, Any] = {"trainer": trainer, "images": 8, "epochs": 3, "warmup_epochs": 1, "nbs": 4}
    alone = train(name="alone", spy=NoSpy(), **options)
    ours = train(accel={"accumulate": 1}, spy=NoSpy(), **options)
    assert same(ours.weights, alone.weights)


def test_24419_the_decay_that_an_own_optimizer_took_over_follows_the_effective_batch(train: Train) -> None:
    run = train(accel={"accumulate": 2}, trainer=PerLayer, images=8, nbs=4)
    follows = 0.0005 * 8 / 4
    assert run.spy.updates[0].decays == pytest.approx([follows, OWN_DECAY if GROUP_NAMES.here else follows])


# -- batches --------------------------------------------------------------------------------------------------------


class Loader:
    """Changes the batches of a loader of the host's."""

    def __init__(self, loader: Any, change: Any) -> None:
        self.loader, self.change = loader, change

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.loader)


FORMS: dict[str, tuple[Any, Any]] = {  # what the loader gives, and back
    "a tuple": (lambda batch: tuple(batch.items()), lambda raw: dict(raw)),
    "another key": (
        lambda batch: {"rgb" if k == "img" else k: v for k, v in batch.items()},
        lambda raw: {"img" if k == "rgb" else k: v for k, v in raw.items()},
    ),
    "a list of images": (
        lambda batch: {**batch, "img": list(batch["img"])},
        lambda raw: {**raw, "img": torch.stack(raw["img"])},
    ),
}


class OwnBatches(DetectionTrainer):
    there, back = FORMS["a tuple"]

    def get_dataloader(self, dataset_path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Any:
        loader = super().get_dataloader(dataset_path, batch_size, rank, mode)
        return Loader(loader, type(self).there) if mode == "train" else loader

    def preprocess_batch(self, batch: Any) -> dict[str, Any]:
        return super().preprocess_batch(type(self).back(batch))


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_which_the_trainer_alone_knows_the_form(form: str, train: Train) -> None:
    there, back = map(staticmethod, FORMS[form])
    trainer = type("OwnTrainer", (OwnBatches,), {"there": there, "back": back})
    options: dict[str, Any] = {"trainer": trainer, "images": 8, "nbs": 4}
    alone, ours = train(name="alone", spy=NoSpy(), **options), train(accel={}, spy=NoSpy(), **options)
    assert same(ours.weights, alone.weights)
    assert ours.report["window"]["micro_batches"] == 2


# -- forwards beside the micro-batch's --------------------------------------------------------------------------------


class Sharpness(DetectionTrainer):
    """davda54/sam: each update's gradients are taken anew, on the last three images, where the first ones lead to."""

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = super().preprocess_batch(batch)
        first = len(batch["img"]) - 3
        mine = batch["batch_idx"] >= first
        self.last_three = {k: batch[k][mine] for k in ("cls", "bboxes")}
        self.last_three |= {"img": batch["img"][first:], "batch_idx": batch["batch_idx"][mine] - first}
        return batch

    def optimizer_step(self) -> None:
        found = [(p, p.grad.detach()) for p in self.model.parameters() if p.grad is not None]
        norm = torch.cat([g.flatten() for _, g in found]).norm()
        moved = [(p, g * 0.05 / norm) for p, g in found]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, move in moved:
                    parameter.add_(move, alpha=sign)
            if sign == 1:
                self.optimizer.zero_grad()
                self.model({**self.last_three})[0].sum().backward()
        self.optimizer.step()  # without the host's clipping, which would hide a wrong size
        self.optimizer.zero_grad()


def test_a_second_forward_within_an_own_step_has_the_host_s_size(train: Train) -> None:
    options: dict[str, Any] = {"trainer": Sharpness, "images": 12, "nbs": 6, "lr0": 1e-3, "spy": NoSpy()}
    frozen = {"on_train_batch_start": freeze_batchnorm}
    right = train(batch=6, callbacks=frozen, name="right", **options)
    ours = train(accel={"accumulate": 2, "batchnorm": "freeze"}, batch=3, **options)
    for name, tensor in right.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_20163_a_loss_that_a_callback_looks_at_is_the_host_s_and_no_micro_batch_of_the_run(train: Train) -> None:
    seen: list[float] = []

    def look(trainer: Any) -> None:
        """With gradients on, as such callbacks are written."""
        batch = next(iter(trainer.test_loader))
        batch["img"] = batch["img"].float() / 255
        training = [(m, m.training) for m in trainer.model.modules()]
        trainer.model.eval()
        seen.append(float(trainer.model({**batch})[0].detach().sum()))
        for module, mode in training:
            module.training = mode

    options: dict[str, Any] = {"images": 16, "epochs": 2, "spy": NoSpy()}
    looks = {"on_train_start": look, "on_train_batch_end": look}
    plain = train(accel={"accumulate": 3}, name="plain", **options)
    ours = train(accel={"accumulate": 3}, callbacks=looks, **options)
    assert same(ours.weights, plain.weights)
    now = len(seen)
    train(callbacks={"on_train_start": look}, name="alone", **options)
    assert seen[now] == seen[0]


def test_a_trainer_may_take_the_backward_of_each_term_by_itself(train: Train) -> None:
    """As gradient surgery (PCGrad, GradNorm) does."""

    class Halves:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

        def backward(self) -> None:
            (self.loss * 0.5).backward(retain_graph=True)
            (self.loss * 0.5).backward()

    def halve(trainer: Any) -> None:
        trainer.scaler.scale = Halves

    options: dict[str, Any] = {"images": 8, "nbs": 4, "spy": NoSpy(), "callbacks": {"on_train_start": halve}}
    alone, ours = train(name="alone", **options), train(accel={}, **options)
    assert same(ours.weights, alone.weights)
