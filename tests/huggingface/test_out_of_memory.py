"""Memory that runs out in the Trainer: the run ends as one that had the smaller micro-batch from the start."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer

from plugins.errors import AccelError
from tests import reference
from tests.huggingface.heads import model_for
from tests.huggingface.runs import losses, report, trainer_for
from tests.short import TOLD, Short

UPDATES, K = 8, 2
SETTINGS = {"max_grad_norm": 1.0, "max_steps": UPDATES, "lr_scheduler_type": "linear"}


class OwnLoss(Trainer):
    """A mean over the labels that count, as a user writes it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**{name: value for name, value in inputs.items() if name != "labels"})
        return F.cross_entropy(out.logits.flatten(0, -2), inputs["labels"].flatten())


def model_with(head, short, dtype=torch.float32):
    model = model_for(head).to(dtype)
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, args, out: short(out))
    return model


def ran(folder, head="bert-token", short=None, micro=4, accumulate=K, kind=Trainer, options=None, **more):
    dtype = more.pop("dtype", torch.float32)
    trainer, spy = trainer_for(
        head, folder, 64, model=model_with(head, short or Short(), dtype), kind=kind,
        options={"plan": "off", "compile": "off", **(options or {})},
        **{**SETTINGS, "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulate, **more},
    )  # fmt: skip
    return trainer, spy


def off(a, b):
    return reference.difference(a.model.state_dict(), b.model.state_dict())


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The runs that have micro-batches of 2 from the start."""
    made = {}

    def run(**how):
        key = repr(sorted(how.items(), key=str))
        if key not in made:
            made[key] = ran(tmp_path_factory.mktemp("right"), micro=2, accumulate=4, **how)
            made[key][0].train()
        return made[key][0]

    return run


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("update", [1, 7, 8])
def test_the_run_equals_that_with_the_smaller_micro_batch_from_the_start(update, backward, right, tmp_path):
    short = Short(most=2, after=(update - 1) * K + 1, backward=backward)
    trainer, _ = ran(tmp_path, short=short)
    trainer.train()
    wanted = right()
    assert short.failed == 1
    assert off(trainer, wanted) < 1e-6
    assert losses(trainer) == pytest.approx(losses(wanted), rel=1e-5)
    facts = report(tmp_path)
    assert (facts["window"]["accumulate"], facts["window"]["micro_batch"], facts["window"]["updates"]) == (4, 2, 8)
    assert facts["memory"]["out_of_memory"] == {"count": 1, "update": update - 1, "micro_batch": 2}
    assert sum("out of memory" in line for line in facts["warnings"]) == 1
    assert trainer.args.gradient_accumulation_steps == K


@pytest.mark.parametrize("update", [1, 7, 8])
def test_the_same_with_adamw(update, right, tmp_path):
    """In double precision: a key's bias has a gradient of rounding alone, which AdamW divides by its own size.

    In single precision two runs of other micro-batches differ there by the learning rate, with and without the plug.
    """
    adamw = {"optim": "adamw_torch", "learning_rate": 1e-2, "dtype": torch.float64}
    trainer, _ = ran(tmp_path, short=Short(most=2, after=(update - 1) * K + 1), **adamw)
    trainer.train()
    assert off(trainer, right(**adamw)) < 1e-9


@pytest.mark.parametrize(("kind", "head"), [(Trainer, "gpt2-causal"), (OwnLoss, "bert-token")])
def test_a_head_that_takes_the_host_s_count_and_a_user_s_loss(kind, head, right, tmp_path):
    trainer, _ = ran(tmp_path, head, Short(most=2, after=3), kind=kind, max_steps=3)
    trainer.train()
    wanted = right(head=head, kind=kind, max_steps=3)
    assert off(trainer, wanted) < 1e-6
    assert losses(trainer) == pytest.approx(losses(wanted), rel=1e-5)


def test_the_host_s_own_sums_are_not_divided(tmp_path):
    """BERT's heads add up their means: with twice the micro-batches the gradient would be twice as large."""
    trainer, _ = ran(tmp_path, short=Short(most=2), options={"normalise": "host"})
    with pytest.raises(AccelError, match=r"cannot be made smaller \(the host's own sums"):
        trainer.train()


def test_what_cannot_be_divided_stops_with_a_checkpoint_that_a_run_goes_on_from(right, tmp_path):
    short = Short(most=0, after=7)
    trainer, _ = ran(tmp_path, short=short, micro=2, accumulate=4)
    with pytest.raises(AccelError, match=r"out of memory at update 1 .* saved in checkpoint-1") as caught:
        trainer.train()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert "\n" not in str(caught.value)
    again, _ = ran(tmp_path, micro=2, accumulate=4)
    again.train(resume_from_checkpoint=True)
    assert off(again, right()) == 0


class TooLarge(torch.optim.SGD):
    """Steps twice; the third time its first weight alone."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(2)
            raise torch.OutOfMemoryError(TOLD)
        return super().step(closure)


@pytest.mark.filterwarnings("error:.*step.* has been overridden")
def test_an_optimizer_s_step_that_does_not_fit_stops_in_one_line_and_saves_nothing(tmp_path):
    model = model_with("bert-token", Short())
    trainer, _ = trainer_for(
        "bert-token", tmp_path, 16, model=model, options={"plan": "off", "compile": "off"},
        extra={"optimizers": (TooLarge(model.parameters(), lr=0.05), None)}, **SETTINGS,
    )  # fmt: skip
    with pytest.raises(AccelError, match="in the optimizer's step of update 2; some weights may have it") as caught:
        trainer.train()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not hasattr(trainer.optimizer.step, "ours")


def test_a_batch_of_no_common_dimension_says_so(tmp_path):
    class Odd(Trainer):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs({name: value for name, value in inputs.items() if name != "packed"})

    def collate(rows):
        return {**{name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]},
                "packed": torch.arange(7)}  # fmt: skip

    trainer, _ = ran(tmp_path, short=Short(most=2), kind=Odd, extra={"data_collator": collate})
    with pytest.raises(AccelError, match=r"cannot be made smaller \(a tensor \[7\] in a batch of 4\)"):
        trainer.train()
