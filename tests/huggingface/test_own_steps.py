"""What a user's code does between the host's fetching and its step: labels, clipping, optimizers."""

from __future__ import annotations

import functools
import types

import pytest
import torch
import transformers as t
from torch.nn.functional import cross_entropy

from integrations.huggingface import versions
from integrations.huggingface.patches import Held, of_host
from tests import reference
from tests.huggingface.heads import Rows, batch_for, model_for
from tests.huggingface.own_losses import SPLIT, named, ours, right
from tests.huggingface.runs import losses, trainer_for

BIG = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1}

# -- labels ---------------------------------------------------------------------------------------------------------


class InLoss(t.Trainer):
    """Turns a data set's whole numbers into what a multi-label head needs, as many recipes do."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {**inputs, "labels": inputs["labels"].float()}, *args, **kwargs)


class InStep(t.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        return super().training_step(model, {**inputs, "labels": inputs["labels"].float()}, *args, **kwargs)


class InInputs(t.Trainer):
    def _prepare_inputs(self, inputs):
        found = super()._prepare_inputs(inputs)
        return {**found, "labels": found["labels"].float()}


@pytest.mark.parametrize("kind", [InLoss, InStep, InInputs])
def test_a_head_chooses_its_loss_by_the_labels_that_a_users_code_gives_it(kind, tmp_path):
    batch = batch_for("bert-multilabel", 8)
    gradients = reference.gradients(model_for("bert-multilabel"), batch, lambda model, rows: model(**rows).loss)
    model = model_for("bert-multilabel")
    model.config.problem_type = None
    trainer, spy = ours("", tmp_path, kind=kind, model=model, batch={**batch, "labels": batch["labels"].long()})
    trainer.train()
    assert model.config.problem_type == "multi_label_classification"
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6


def hide(labels):
    """Two thirds of the labels; a micro-batch's first row keeps one more."""
    labels[:, 4:] = -100
    labels[0, 4] = 1
    return labels


class HidesInPlace(t.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        hide(inputs["labels"])
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class HidesBefore(t.Trainer):
    def _prepare_inputs(self, inputs):
        found = super()._prepare_inputs(inputs)
        return {**found, "labels": hide(found["labels"].clone())}


class HidesBeforeOwnLoss(HidesBefore):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("kind", [HidesInPlace, HidesBefore, HidesBeforeOwnLoss])
def test_labels_hidden_after_the_count_leave_a_gradient_of_the_right_size_and_are_named(kind, tmp_path):
    """Every micro-batch has as many labels, so that its K-th part is the big batch's."""
    batch = batch_for("bert-masked", 8)
    parts = [{name: value[at : at + 2].clone() for name, value in batch.items()} for at in range(0, 8, 2)]
    hidden = {name: torch.cat([part[name] for part in parts]) for name in batch}
    hidden["labels"] = torch.cat([hide(part["labels"]) for part in parts])
    gradients = reference.gradients(model_for("bert-masked"), hidden, lambda model, rows: model(**rows).loss)
    trainer, spy = ours("bert-masked", tmp_path, kind=kind, batch=batch)
    trainer.train()
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6
    assert named(tmp_path)[0].startswith("a micro-batch has other labels than when its window was counted")


def test_eval_loss_is_the_mean_over_the_labels_that_a_users_code_leaves(tmp_path):
    batch = batch_for("bert-masked", 8)
    batch["labels"][3:, 2:] = -100
    trainer, _ = ours("bert-masked", tmp_path, kind=HidesBefore, batch=batch, per_device_eval_batch_size=3)
    parts = [{name: value[at : at + 3].clone() for name, value in batch.items()} for at in range(0, 8, 3)]
    whole = {**batch, "labels": torch.cat([hide(part["labels"]) for part in parts])}
    with torch.no_grad():
        true = float(model_for("bert-masked").eval()(**whole).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(true, rel=2e-6)


class Penalty(t.Trainer):
    """The recommended form: the host's loss, given the count, and a term beside it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        loss = loss + 0.1 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


def test_a_term_beside_the_loss_of_a_head_that_leaves_the_count_aside_is_divided_by_k(tmp_path):
    """BERT gets the host's count and does not use it: the host alone has K times the gradient."""
    found = {}
    for plug, split in ((True, SPLIT), (False, BIG)):
        trainer, spy = trainer_for("bert-sequence", tmp_path / str(plug), 8, plug=plug, kind=Penalty,
                                   options={"buckets": "off"}, **split)  # fmt: skip
        trainer.train()
        found[plug] = (spy.gradients[0], losses(trainer)[0])
    assert reference.difference(found[True][0], found[False][0]) <= 1e-6
    assert found[True][1] == pytest.approx(found[False][1], rel=2e-6)
    assert "hides how many terms" in named(tmp_path / "True")[0]


def test_a_term_beside_a_loss_that_uses_the_count_stays_as_the_host_has_it_and_is_named(tmp_path):
    found = []
    for plug in (True, False):
        trainer, spy = ours("llama-causal", tmp_path / str(plug), plug, kind=Penalty)
        trainer.train()
        found.append(spy.gradients[0])
    assert reference.difference(*found) <= 1e-6
    assert "hides how many terms" in named(tmp_path / "True")[0]


# -- clipping and the optimizer ---------------------------------------------------------------------------------------


class EachAlone(t.Trainer):
    """Clips every parameter by itself, and says another norm."""

    clipped = 0

    def _clip_grad_norm(self, model):
        self.clipped += 1
        for parameter in model.parameters():
            torch.nn.utils.clip_grad_norm_([parameter], 0.01)
        return torch.tensor(7.0)

    def _get_grad_norm(self, model, grad_norm=None):
        return 2 * super()._get_grad_norm(model, grad_norm=grad_norm)


def by_function(trainer):
    """Puts a function of another name on the trainer."""

    def each_alone(model):
        trainer.clipped = getattr(trainer, "clipped", 0) + 1
        return torch.nn.utils.clip_grad_value_(list(model.parameters()), 0.01) or torch.tensor(7.0)

    trainer._clip_grad_norm = each_alone


def by_value(trainer):
    """The recipe that puts a function on accelerate."""

    def clip(parameters, max_norm, norm_type=2):
        trainer.clipped = getattr(trainer, "clipped", 0) + 1
        return torch.nn.utils.clip_grad_value_(list(parameters), 0.01) or torch.tensor(7.0)

    trainer.accelerator.clip_grad_norm_ = clip


@pytest.mark.parametrize(
    ("way", "clip_norm"), [("subclass", "host"), ("function", "host"), ("accelerator", "host"), ("accelerator", "off")]
)
def test_a_users_own_clipping_runs_once_an_update_on_the_exact_gradient(way, clip_norm, tmp_path):
    if way != "accelerator" and not versions.GRAD_NORM.here:
        pytest.skip("such a host has no method for it")
    found = {}
    for plug, split in ((True, SPLIT), (False, BIG)):
        kind = EachAlone if way == "subclass" else t.Trainer
        trainer, spy = trainer_for("bert-token", tmp_path / str(plug), 8, plug=plug, kind=kind, max_grad_norm=1.0,
                                   options={"buckets": "off", "clip_norm": clip_norm}, **split)  # fmt: skip
        {"subclass": lambda trainer: None, "function": by_function, "accelerator": by_value}[way](trainer)
        trainer.train()
        found[plug] = spy.gradients[0]
        assert trainer.clipped == 1
        assert trainer.state.log_history[0]["grad_norm"] == (14.0 if way == "subclass" else 7.0)
    exact = right("bert-token")[0]
    if way != "subclass":
        exact = {name: gradient.clamp(-0.01, 0.01) for name, gradient in exact.items()}
        assert reference.difference(found[True], exact) <= 1e-6
    assert reference.difference(found[True], found[False]) <= 1e-4  # of gradients that are nothing but rounding


class Exchanges(t.TrainerCallback):
    """Puts an optimizer over the head alone, and another limit, into the run after its first update."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1 and not hasattr(self, "put"):
            self.put = torch.optim.SGD(model.classifier.parameters(), 0.05)
            self.trainer.optimizer = self.trainer.accelerator.prepare_optimizer(self.put)
            args.max_grad_norm = 0.3


def test_the_optimizer_and_the_limit_that_a_callback_puts_there_are_those_in_force(tmp_path):
    found = []
    for plug in (True, False):
        exchanges = Exchanges()
        trainer, spy = trainer_for("bert-token", tmp_path / str(plug), 8, plug=plug, options={"buckets": "off"},
                                   batch=Rows(batch_for("bert-token", 8)), max_steps=2,
                                   per_device_train_batch_size=4, max_grad_norm=1.0)  # fmt: skip
        trainer.add_callback(exchanges)
        exchanges.trainer = trainer
        trainer.train()
        found.append(spy.weights[1])
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


class LossWithWeights(t.Trainer):
    """A loss that has weights of its own in the optimizer, as ArcFace's or sentence-transformers' SoftmaxLoss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.beside = torch.nn.Linear(3, 3)

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.beside.parameters()], 0.05)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = cross_entropy(self.beside(model(**inputs).logits), inputs["labels"])
        return (loss, {}) if return_outputs else loss


def test_what_the_optimizer_holds_beside_the_model_is_left_out_of_the_norm_as_with_the_host(tmp_path):
    found = []
    for plug in (True, False):
        trainer, spy = trainer_for("bert-sequence", tmp_path / str(plug), 8, plug=plug, kind=LossWithWeights,
                                   per_device_train_batch_size=4, max_steps=2, max_grad_norm=0.3)  # fmt: skip
        trainer.train()
        found.append({**spy.weights[1], **trainer.beside.state_dict()})
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


@pytest.mark.parametrize("clip_norm", ["off", 0.01])
def test_the_setting_clips_or_leaves_what_the_optimizer_holds_beside_the_model(clip_norm, tmp_path):
    """The host's limit is far below: gradients that it clipped move next to nothing."""
    moved = {}
    for plug, limit in ((True, 1e-4), (False, 0.0)):
        trainer, _ = trainer_for("bert-sequence", tmp_path / str(plug), 8, plug=plug, kind=LossWithWeights,
                                 max_grad_norm=limit, options={"buckets": "off", "clip_norm": clip_norm},
                                 **BIG)  # fmt: skip
        before = {n: p.detach().clone() for n, p in [*trainer.model.named_parameters(), *own_weights(trainer)]}
        trainer.train()
        after = dict([*trainer.model.named_parameters(), *own_weights(trainer)])
        moved[plug] = torch.cat([(after[name].detach() - before[name]).flatten() for name in before]) / 0.05
    if clip_norm != "off":
        moved[False] *= clip_norm / moved[False].norm()
    assert torch.allclose(moved[True], moved[False], atol=1e-5)
    assert moved[True].norm() > 5e-3


def own_weights(trainer):
    return [(f"beside.{name}", parameter) for name, parameter in trainer.beside.named_parameters()]


def test_what_a_user_put_on_a_trainer_is_not_the_hosts():
    trainer = object.__new__(t.Trainer)
    assert of_host(trainer.training_step)
    for put in (by_value, lambda *args: None, functools.partial(t.Trainer.training_step, trainer)):
        trainer.training_step = put
        assert not of_host(trainer.training_step)
    trainer.training_step = types.MethodType(functools.partial(t.Trainer.training_step), trainer)
    assert not of_host(trainer.training_step)
    del trainer.training_step
    Held(trainer).method("training_step", lambda original, *args: None)
    assert of_host(trainer.training_step)
