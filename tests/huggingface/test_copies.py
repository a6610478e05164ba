"""A copy of a trainer is the host's own, with a copy of the plug that takes hold of it alone."""

from __future__ import annotations

import copy
import pickle

import torch
from accelerate.state import GradientState

from plugins.hf import AccelCallback
from tests import reference
from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.runs import Spy, report, trainer_for

SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
ENTRY = {"train", "_inner_training_loop", "_get_dataloader", "evaluation_loop"}


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def right_gradients():
    return reference.gradients(
        model_for("bert-token"), batch_for("bert-token", 4, uneven=True), lambda m, b: m(**b).loss
    )


def plug_of(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, AccelCallback))


def spy_of(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Spy))


def test_a_deep_copy_trains_itself_by_a_plug_of_its_own_with_the_settings(tmp_path):
    more = {**SPLIT, "gradient_accumulation_steps": 1}
    trainer, spy = trainer_for("bert-token", tmp_path, 4, options={"accumulate": 4}, **more)
    made = copy.deepcopy(trainer)
    before = weights(trainer)
    made.train()
    assert torch.equal(weights(trainer), before)
    assert not torch.equal(weights(made), before)
    assert spy.gradients == []
    assert reference.difference(spy_of(made).gradients[0], right_gradients()) <= 1e-6
    assert plug_of(made) is not plug_of(trainer)
    assert plug_of(made).report["window"]["micro_batches"] == 4
    trainer.train()
    assert torch.equal(weights(trainer), weights(made))


def test_a_trainer_that_is_pickled_trains_as_the_original(tmp_path):
    GradientState._reset_state()  # it refers weakly to the loaders of earlier trainers, as with the host alone
    trainer, spy = trainer_for("bert-token", tmp_path, 4, options={"ema": 0.9}, **SPLIT)
    again = pickle.loads(pickle.dumps(trainer))
    assert not ENTRY & set(vars(again))
    assert plug_of(again).adapter is None
    again.train()
    assert reference.difference(spy_of(again).gradients[-1], right_gradients()) <= 1e-6
    assert report(tmp_path)["ema"]["updates"] == 1
    assert set(vars(trainer)) >= ENTRY
    assert spy.gradients == []


def test_a_shallow_copy_shares_its_callbacks_and_whoever_trains_has_the_plug(tmp_path):
    trainer, spy = trainer_for("bert-token", tmp_path, 4, **SPLIT)
    twin = copy.copy(trainer)
    assert not ENTRY & set(vars(twin))
    for each in (twin, trainer):
        each.model = each.model_wrapped = model_for("bert-token")
        each.optimizer = each.lr_scheduler = None
        each.train()
        assert reference.difference(spy.gradients[-1], right_gradients()) <= 1e-6


def test_copies_made_inside_a_run_are_those_of_the_host(tmp_path):
    class Copies(Spy):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            copied, pickled = copy.deepcopy(trainer), pickle.loads(pickle.dumps((args, model)))
            self.made = copied
            assert copied.args.gradient_accumulation_steps == pickled[0].gradient_accumulation_steps == 1
            assert {name for name, value in vars(copied).items() if getattr(value, "ours", False)} == ENTRY
            assert all(not value.ours for value in vars(pickled[1]).values() if hasattr(value, "ours"))

    more = {**SPLIT, "gradient_accumulation_steps": 1}
    options = {"accumulate": 4, "compile": "auto"}
    trainer, _ = trainer_for("gpt2-causal", tmp_path, 4, options=options, **more)
    seen = Copies()
    trainer.add_callback(seen)
    trainer.train()
    assert plug_of(seen.made) is not plug_of(trainer)


def test_arguments_that_were_replaced_after_the_trainer_was_built_are_the_ones_in_force(tmp_path):
    more = {**SPLIT, "gradient_accumulation_steps": 1}
    trainer, spy = trainer_for("bert-token", tmp_path, 4, options={"accumulate": 4}, **more)
    trainer.args = copy.deepcopy(trainer.args)
    trainer.train()
    assert reference.difference(spy.gradients[0], right_gradients()) <= 1e-6
    assert trainer.args.gradient_accumulation_steps == 1
