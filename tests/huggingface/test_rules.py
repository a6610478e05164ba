"""How losses are counted that a head's name does not tell, or tells wrongly: the update is that of the big batch."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as t
from torch.nn.functional import cross_entropy

from tests import reference
from tests.huggingface.heads import HIDDEN, VOCAB, batch_for, model_for
from tests.huggingface.runs import LOGGED, losses, report, trainer_for

SIZE = 8
LEFT = "the loss adds up in another way than on the first batch; weighted as the host does"


def both(tmp_path, make, batch, updates=1, kind=t.Trainer, extra=None, micro=2, **more):
    """(plug, spy, spy of the host's one big batch), `updates` windows of 4 micro-batches."""
    size = micro * 4
    common = {"batch": batch, "kind": kind, "max_steps": updates, "extra": extra, **more}
    big, right = trainer_for(
        "", tmp_path / "big", size, plug=False, model=make(), per_device_train_batch_size=size, **common
    )
    big.train()
    ours, spy = trainer_for(
        "", tmp_path / "ours", size, model=make(), per_device_train_batch_size=micro, gradient_accumulation_steps=4,
        options={"buckets": "off"}, **common,
    )  # fmt: skip
    ours.train()
    return ours, spy, right


def off(spy, right, update=0):
    return reference.difference(spy.gradients[update], right.gradients[update])


def approximate(tmp_path):
    return report(tmp_path / "ours")["window"]["approximate_terms"]


def seeded(build):
    def make():
        torch.manual_seed(0)
        return build()

    return make


class WeightedBert(t.BertForTokenClassification):
    """A head of the user's own under a known name: classes weigh unequally, so nothing adds up."""

    def forward(self, labels=None, **inputs):
        logits = super().forward(**inputs).logits
        weight = torch.tensor([1.0, 9.0, 3.0])
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), weight) if labels is not None else None
        return {"loss": loss, "logits": logits}


class AnsweringBert(t.BertForTokenClassification):
    """A name that promises start and end positions, and labels instead."""

    def forward(self, labels=None, **inputs):
        logits = super().forward(**inputs).logits
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


AnsweringBert.__name__ = "AnsweringForQuestionAnswering"


class PlainSubclass(t.BertForTokenClassification):
    """Adds nothing to the loss: still known by the class that wrote its forward."""


@pytest.mark.parametrize("kind", [AnsweringBert, PlainSubclass])
def test_a_head_of_the_user_under_a_name_of_the_host(kind, tmp_path):
    config = model_for("bert-token").config
    _, spy, right = both(tmp_path, seeded(lambda: kind(config)), batch_for("bert-token", SIZE, uneven=True))
    assert off(spy, right) < 1e-5
    assert approximate(tmp_path) == []


def test_a_head_of_the_user_that_does_not_add_up_is_left_to_the_host(tmp_path):
    config = model_for("bert-token").config
    both(tmp_path, seeded(lambda: WeightedBert(config)), batch_for("bert-token", SIZE, uneven=True))
    assert "hides how many terms" in approximate(tmp_path)[0]


def test_a_causal_head_whose_labels_are_not_shifted(tmp_path):
    config = t.BartConfig(
        vocab_size=VOCAB, d_model=HIDDEN, decoder_layers=1, encoder_layers=1, decoder_attention_heads=2,
        encoder_attention_heads=2, decoder_ffn_dim=16, encoder_ffn_dim=16, dropout=0.0, is_decoder=True,
        is_encoder_decoder=False, max_position_embeddings=64, init_std=0.2,
    )  # fmt: skip
    batch = {k: v for k, v in batch_for("bert-token", SIZE, uneven=True).items() if k != "token_type_ids"}
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    batch["labels"][1::3, 1:] = -100  # the first label alone, which a shifted loss would not count
    _, spy, right = both(tmp_path, seeded(lambda: t.BartForCausalLM(config)), batch)
    assert off(spy, right) < 1e-5
    assert approximate(tmp_path) == []


def weighted(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 9.0, 3.0]))


def test_weighted_classes_are_seen_through_though_the_first_batch_has_one_class(tmp_path):
    batch = batch_for("vit-image", SIZE, uneven=True)
    batch["labels"] = torch.tensor([0, 0, 0, 0, 1, 2, 1, 1])
    both(tmp_path, lambda: model_for("vit-image"), batch, extra={"compute_loss_func": weighted})
    assert "hides how many terms" in approximate(tmp_path)[0]


def by_sequence(outputs, labels, num_items_in_batch=None):
    """Each sequence's own mean, then the mean of these."""
    each = cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
    valid = labels != -100
    return (each.sum(1) / valid.sum(1).clamp(min=1)).mean()


def test_means_by_sequence_though_the_first_sequences_are_of_one_length(tmp_path):
    batch = batch_for("bert-token", SIZE, uneven=True)
    batch["labels"][:2] = batch["labels"][:2].clamp(min=0)
    _, spy, right = both(tmp_path, lambda: model_for("bert-token"), batch, extra={"compute_loss_func": by_sequence})
    assert off(spy, right) < 1e-5
    assert approximate(tmp_path) == []


def test_a_rule_that_fits_by_chance_is_given_up_when_it_no_longer_does(tmp_path):
    """With a classifier of zeros every loss is log C: only later windows tell."""

    def make():
        model = model_for("vit-image")
        torch.nn.init.zeros_(model.classifier.weight)
        torch.nn.init.zeros_(model.classifier.bias)
        return model

    batch = {k: v.repeat(4, *[1] * (v.dim() - 1)) for k, v in batch_for("vit-image", SIZE, uneven=True).items()}
    both(tmp_path, make, batch, updates=4, extra={"compute_loss_func": weighted})
    assert approximate(tmp_path) == [LEFT]


def test_single_samples_are_measured_together(tmp_path):
    def mean(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels)

    _, spy, right = both(
        tmp_path, lambda: model_for("vit-image"), batch_for("vit-image", 4, uneven=True), micro=1,
        extra={"compute_loss_func": mean},
    )  # fmt: skip
    assert off(spy, right) < 1e-5
    assert approximate(tmp_path) == []


class Twice(t.Trainer):
    """Asks for the loss twice in one step, as adversarial training does."""

    def training_step(self, *args, **kwargs):
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


def test_a_step_that_asks_for_the_loss_twice(tmp_path):
    batch = batch_for("bert-token", SIZE, uneven=True)
    _, spy, right = both(tmp_path, lambda: model_for("bert-token"), batch, kind=Twice)
    assert off(spy, right) < 1e-5


def test_a_callback_that_asks_for_a_loss_takes_no_weight(tmp_path):
    class Asks(t.TrainerCallback):
        def on_substep_end(self, *args, model=None, **kwargs):
            trainer.compute_loss(model, dict(batch))

    batch = batch_for("bert-token", 4, uneven=True)
    trainer, spy = trainer_for("bert-token", tmp_path, 4, batch=batch, per_device_train_batch_size=1,
                               gradient_accumulation_steps=4, max_steps=1, options={"buckets": "off"})  # fmt: skip
    trainer.add_callback(Asks())
    trainer.train()
    model = model_for("bert-token")
    loss = model(**batch).loss
    loss.backward()
    assert losses(trainer) == [pytest.approx(float(loss.detach()), rel=1e-5, abs=LOGGED)]
    assert reference.difference(spy.gradients[0], {n: p.grad for n, p in model.named_parameters()}) < 1e-5


def test_a_compute_loss_put_on_the_trainer_itself(tmp_path):
    trainer, _ = trainer_for("vit-image", tmp_path, 4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                             max_steps=1)  # fmt: skip
    trainer.compute_loss = lambda model, inputs, **kwargs: model(**inputs).loss ** 2
    trainer.train()
    assert "compute_loss hides how many terms" in report(tmp_path)["window"]["approximate_terms"][0]


def test_a_segmentation_of_one_label_is_a_mean_over_all_pixels(tmp_path):
    config = t.SegformerConfig(
        num_labels=1, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    labels = torch.randint(0, 2, (SIZE, 32, 32))
    labels[::3, :20] = 255
    batch = {"pixel_values": torch.randn(SIZE, 3, 32, 32), "labels": labels}

    def make():
        torch.manual_seed(0)
        model = t.SegformerForSemanticSegmentation(config)
        model.decode_head.batch_norm = torch.nn.Identity()
        return model

    _, spy, right = both(tmp_path, make, batch)
    assert off(spy, right) < 1e-5


class NoOutputs(t.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())


def test_a_micro_batch_without_a_term_and_a_loss_that_never_gives_outputs(tmp_path):
    batch = batch_for("bert-token", SIZE, uneven=True)
    batch["labels"][2:4] = -100
    _, spy, right = both(tmp_path, lambda: model_for("bert-token"), batch, kind=NoOutputs)
    assert off(spy, right) < 1e-5


def test_evaluation_over_no_term_is_not_a_number(tmp_path):
    batch = batch_for("bert-token", 4, uneven=True)
    batch["labels"][:] = -100
    trainer, _ = trainer_for("bert-token", tmp_path, 4, batch=batch, per_device_eval_batch_size=2)
    assert math.isnan(trainer.evaluate()["eval_loss"])
