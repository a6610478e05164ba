"""The gradient of a user's own loss or training step is the big batch's, or it is named."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers as t
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import ForCausalLMLoss

from integrations.huggingface import versions
from tests import reference
from tests.huggingface.heads import HIDDEN, VOCAB, batch_for, model_for
from tests.huggingface.own_losses import SIZE, SPLIT, named, ours, right
from tests.huggingface.runs import losses, trainer_for

# -- a scaling of the user's own -----------------------------------------------------------------------------------


def own_step(divisor):
    class Own(t.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            loss = loss / divisor
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


@pytest.mark.parametrize("head", ["bert-token", "llama-causal"])
@pytest.mark.parametrize("divisor", [1, 4])
def test_a_training_step_that_divides_by_k_or_leaves_it_has_the_true_gradient(divisor, head, tmp_path):
    trainer, spy = ours(head, tmp_path, kind=own_step(divisor))
    trainer.train()
    gradients, loss = right(head)
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6
    assert losses(trainer) == [pytest.approx(loss, rel=2e-6)]
    assert named(tmp_path) == []


def test_a_training_step_that_scales_by_a_factor_of_its_own_keeps_it_and_is_named(tmp_path):
    trainer, spy = ours("bert-token", tmp_path, kind=own_step(8))
    trainer.train()
    half = {name: gradient / 2 for name, gradient in right("bert-token")[0].items()}
    assert reference.difference(spy.gradients[0], half) <= 1e-6
    assert named(tmp_path) == ["training_step scales the loss by a factor of its own, which stays"]


class Divides(t.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class Declared(Divides):
    loss_is_scaled_for_ga = True


class Property(Divides):
    @property
    def loss_is_scaled_for_ga(self):
        return True


@pytest.mark.parametrize("kind", [Divides, Declared, Property])
def test_a_compute_loss_that_divides_by_k_has_the_true_gradient(kind, tmp_path):
    trainer, spy = ours("bert-token", tmp_path, kind=kind)
    trainer.train()
    gradients, loss = right("bert-token")
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6
    assert losses(trainer) == [pytest.approx(loss, rel=2e-6)]


class DividesUntold(Declared):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss**2 / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_no_known_kind_that_divides_by_k_stays_as_the_host_has_it_and_is_named(tmp_path):
    found = []
    for plug in (True, False):
        trainer, spy = ours("bert-token", tmp_path / str(plug), plug, kind=DividesUntold)
        trainer.train()
        found.append(spy.gradients[0])
    assert reference.difference(*found) <= 1e-6
    assert "hides how many terms" in named(tmp_path / "True")[0]


# -- a loss of no known kind -----------------------------------------------------------------------------------------


def weighted(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=torch.tensor([1.0, 9.0, 3.0]))


def test_a_loss_of_no_known_kind_is_divided_by_k_and_named(tmp_path):
    """The host alone has K times the gradient."""
    found = {}
    for plug in (True, False):
        trainer, spy = ours("bert-token", tmp_path / str(plug), plug, extra={"compute_loss_func": weighted})
        trainer.train()
        found[plug] = spy.gradients[0]
    quarter = {name: gradient / 4 for name, gradient in found[False].items()}
    assert reference.difference(found[True], quarter) <= 1e-6
    assert "hides how many terms" in named(tmp_path / "True")[0]


def focal(outputs, labels, num_items_in_batch=None):
    each = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum() / num_items_in_batch


def test_a_loss_of_no_known_kind_over_the_hosts_count_is_seen_to_be_exact(tmp_path):
    found = {}
    for plug in (True, False):
        trainer, spy = ours("bert-token", tmp_path / str(plug), plug, extra={"compute_loss_func": focal})
        trainer.train()
        found[plug] = spy.gradients[0]
    assert reference.difference(found[True], found[False]) <= 1e-6
    assert named(tmp_path / "True") == []
    terms = (batch_for("bert-token", SIZE, uneven=True)["labels"] != -100).sum()
    model = trainer.model.eval()
    trainer, _ = ours("bert-token", tmp_path, extra={"compute_loss_func": focal}, model=model)
    batch = batch_for("bert-token", SIZE, uneven=True)
    with torch.no_grad():
        whole = focal(model(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"], terms)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(whole), rel=2e-6)


# -- the true mean ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["llama-causal", "gpt2-causal"])
def test_the_library_loss_over_the_hosts_count_has_the_true_mean(head, tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return ForCausalLMLoss(outputs.logits, labels, VOCAB, num_items_in_batch=num_items_in_batch)

    trainer, spy = ours(head, tmp_path, extra={"compute_loss_func": loss})
    gradients, mean = right(head)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean, rel=2e-6)
    trainer.train()
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6
    assert losses(trainer) == [pytest.approx(mean, rel=2e-6)]


def prompted(kind):
    config = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "encoder": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    }[kind]()
    model = model_for("llama-causal")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("kind", ["prompt", "encoder"])
def test_prompt_and_p_tuning_count_the_first_label_too(kind, tmp_path):
    gradients, mean = right("llama-causal", prompted(kind))
    trainer, spy = ours("llama-causal", tmp_path, model=prompted(kind))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean, rel=2e-6)
    trainer.train()
    assert reference.difference(spy.gradients[0], gradients) <= 1e-6
    assert losses(trainer) == [pytest.approx(mean, rel=2e-6)]
    assert named(tmp_path) == []


def test_ctc_with_a_sum_trains_on_the_sum_and_logs_both_losses_per_sample(tmp_path):
    config = t.Wav2Vec2Config(
        vocab_size=8, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="sum", pad_token_id=0,
    )  # fmt: skip

    def make():
        torch.manual_seed(0)
        return t.Wav2Vec2ForCTC(config).train()

    torch.manual_seed(1)
    batch = {"input_values": torch.randn(SIZE, 160), "labels": torch.randint(1, 8, (SIZE, 4))}
    model = make()
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    trainer, spy = ours("", tmp_path, model=make(), batch=batch)
    per_sample = float(loss.detach()) / SIZE
    assert trainer.evaluate()["eval_loss"] == pytest.approx(per_sample, rel=1e-5)
    trainer.train()
    assert reference.difference(spy.gradients[0], gradients) <= 1e-5
    assert losses(trainer) == [pytest.approx(per_sample, rel=1e-5)]


def test_a_rare_class_with_a_weight_of_its_own_is_named_when_it_comes(tmp_path):
    """Two classes of one weight, the rare class not among the first rows (transformers#7024)."""

    def loss(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 1.0, 5.0]))

    batch = {k: v.repeat(3, *[1] * (v.dim() - 1)) for k, v in batch_for("vit-image", SIZE).items()}
    batch["labels"] = torch.tensor([0, 1] * 8 + [0, 1, 0, 1, 0, 1, 0, 2])
    trainer, _ = trainer_for("vit-image", tmp_path, 24, batch=batch, options={"buckets": "off"},
                             extra={"compute_loss_func": loss}, **{**SPLIT, "max_steps": 3})  # fmt: skip
    trainer.train()
    assert named(tmp_path) == ["the loss adds up in another way than on the first batch; weighted as the host does"]


class CountsTwice(t.Trainer):
    """Counts a window's terms twice as high, and how often it is asked for what the host asks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = []

    def _get_num_items_in_batch(self, batches, device):
        self.asked.append("count")
        return torch.tensor(2 * sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))

    def _prepare_input(self, data):
        self.asked.append("input")
        return super()._prepare_input(data)


@pytest.mark.skipif(not versions.COUNT.here, reason="such a host has no count of its own to be replaced")
def test_an_own_count_of_a_window_is_the_one_that_the_loss_is_divided_by(tmp_path):
    runs = []
    for plug in (False, True):
        trainer, spy = ours("llama-causal", tmp_path / str(plug), plug=plug, kind=CountsTwice)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        runs.append((trainer.asked, before, losses(trainer), spy.gradients[0]))
    (asked, before, logged, gradients), (asked_too, before_too, logged_too, gradients_too) = runs
    assert asked_too == asked
    assert before_too == pytest.approx(before, rel=1e-5)
    assert logged_too == pytest.approx(logged, rel=1e-5)
    assert reference.difference(gradients_too, gradients) < 1e-5
