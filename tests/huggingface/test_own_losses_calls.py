"""What a user wrote runs as often as the host alone would run it."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from torch.nn.functional import cross_entropy

from integrations.huggingface.loss_rules.head_probe import invisible_copy
from tests import processes, reference
from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.own_losses import SIZE, ours, right


class Traces(t.Trainer):
    """Logs, keeps metrics by the mode it is in, and draws a random number in every call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.calls.append((model.training, len(inputs["labels"]), torch.rand(()).item()))
        self.log({"seen": 1.0})
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Counts(t.BertForTokenClassification):
    """A model that counts the samples it saw in a buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids=None, **kwargs):
        self.samples += len(input_ids)
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_compute_loss_that_logs_is_called_as_often_as_by_the_host(tmp_path):
    found = []
    for plug in (True, False):
        trainer, _ = ours("bert-token", tmp_path / str(plug), plug, kind=Traces, max_steps=3, eval_strategy="steps",
                          eval_steps=1)  # fmt: skip
        trainer.train()
        found.append((trainer.calls, sum("seen" in entry for entry in trainer.state.log_history)))
    assert found[0] == found[1]


def test_a_buffer_that_counts_samples_counts_as_with_the_host(tmp_path):
    found = []
    for plug in (True, False):
        torch.manual_seed(0)
        model = Counts(model_for("bert-token").config)
        trainer, _ = ours("bert-token", tmp_path / str(plug), plug, model=model, max_steps=4)
        trainer.evaluate()
        trainer.train()
        found.append(int(model.samples))
    assert found == [5 * SIZE, 5 * SIZE]


def test_a_compute_loss_func_is_called_as_often_as_by_the_host(tmp_path):
    calls = []

    def loss(outputs, labels, num_items_in_batch=None):
        calls.append(len(labels))
        return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    trainer, spy = ours("bert-token", tmp_path, extra={"compute_loss_func": loss})
    trainer.train()
    assert calls == [2, 2, 2, 2]
    assert reference.difference(spy.gradients[0], right("bert-token")[0]) <= 1e-6


def test_hooks_and_buffers_of_a_head_of_the_host_are_not_seen_by_its_check(tmp_path):
    calls = []
    for plug in (True, False):
        model = model_for("resnet-image")
        model.register_forward_hook(lambda *args: calls.append(1))
        trainer, _ = ours("vit-image", tmp_path / str(plug), plug, model=model)
        trainer.train()
        assert len(calls) == 4
        assert int(next(b for n, b in model.named_buffers() if "num_batches" in n)) == 4
        calls.clear()


def test_a_copy_shares_the_parameters_and_nothing_else():
    model = model_for("resnet-image")
    copied = invisible_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert not {id(b) for b in model.buffers()} & {id(b) for b in copied.buffers()}
    assert (model.training, copied.training) == (True, False)
    assert invisible_copy(Counts(model_for("bert-token").config)) is None


def test_two_ranks_whose_loss_gathers_end_and_are_exact_with_batches_of_one(tmp_path):
    target = tmp_path / "found.pt"
    command = processes.torchrun("tests.huggingface.ranks", str(target), "gathering", "passed_on")
    processes.launch(command, tmp_path / "log", seconds=240)
    both = torch.load(target, weights_only=False)
    found = both["gathering"]
    assert found["calls"] == 6
    assert found["apart"] == 0.0
    batch = batch_for("bert-token", 12, uneven=True)
    window = {name: value[:6] for name, value in batch.items()}
    gradients = reference.gradients(model_for("bert-token"), window, lambda model, rows: model(**rows).loss)
    assert reference.difference(found["gradients"], gradients) <= 1e-6
    model = model_for("bert-token").eval()
    model.load_state_dict(found["weights"])
    with torch.no_grad():
        assert found["eval_loss"] == pytest.approx(float(model(**batch).loss), rel=2e-6)
    # what the host multiplies by the ranks, though nothing is divided by its count
    gradients, loss = right("bert-token")
    for one in both["passed_on"].values():
        assert reference.difference(one["gradients"], gradients) <= 1e-6
        assert (one["loss"], one["eval_loss"]) == (pytest.approx(loss, rel=2e-6), pytest.approx(loss, rel=2e-6))
