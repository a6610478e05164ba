"""N micro-batches give the gradient, the logged loss and the eval_loss of one batch, for every head (case 47688)."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from integrations.huggingface import versions
from tests import processes, reference
from tests.huggingface.heads import HEADS, batch_for, model_for
from tests.huggingface.ranks import SPLITS
from tests.huggingface.runs import LOGGED, losses, report, trainer_for

GRADIENT = 1e-6


@cache
def right(head: str, size: int):
    """Gradient and loss of one plain batch of `size` rows, BatchNorm held."""
    batch = batch_for(head, size, uneven=True)

    def loss(model, rows):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        return model(**rows).loss

    model = model_for(head)
    with torch.no_grad():
        evaluation = float(model_for(head).eval()(**batch).loss)
    return reference.gradients(model, batch, loss), float(loss(model, batch).detach()), evaluation


@pytest.mark.parametrize(("micro", "accumulate"), SPLITS)
@pytest.mark.parametrize("head", HEADS)
def test_one_process(head, micro, accumulate, tmp_path):
    size = micro * accumulate
    trainer, spy = trainer_for(
        head,
        tmp_path,
        size,
        options={"batchnorm": "freeze"},
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
    )
    gradients, loss, evaluation = right(head, size)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluation, rel=2e-6)
    trainer.train()
    assert reference.difference(spy.gradients[0], gradients) <= GRADIENT
    assert losses(trainer) == [pytest.approx(loss, rel=2e-6, abs=LOGGED)]
    norm = spy.norms[0]
    if versions.GRAD_NORM.here:  # an older host logs no norm where it clips nothing
        norm = next(e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e)
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients.values())), rel=1e-5)
    facts = report(tmp_path)["window"]
    assert (facts["updates"], facts["exact"], facts["approximate_terms"]) == (1, True, [])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Everything that needs two ranks, in one launch."""
    target = tmp_path_factory.mktemp("ranks") / "found.pt"
    command = processes.torchrun("tests.huggingface.ranks", str(target), "gradients", "in_step", "compiled", "buckets")
    processes.launch(command, target.with_name("log"), seconds=400)
    return torch.load(target, weights_only=False)


@pytest.mark.parametrize(("micro", "accumulate"), SPLITS)
@pytest.mark.parametrize("head", HEADS)
def test_two_ranks(head, micro, accumulate, two_ranks):
    found = two_ranks["gradients"][f"{head} {micro}x{accumulate}"]
    gradients, loss, evaluation = right(head, 2 * micro * accumulate)
    assert reference.difference(found["gradients"], gradients) <= GRADIENT
    assert found["loss"] == pytest.approx(loss, rel=2e-6, abs=LOGGED)
    if found["eval_loss"] is not None:
        assert found["eval_loss"] == pytest.approx(evaluation, rel=2e-6)


def test_ranks_stay_in_step_and_reduce_once_an_update(two_ranks):
    found = two_ranks["in_step"]
    assert found["apart"] == 0.0
    assert found["reductions"] == 3
    assert [name for name in found["files"] if not name.startswith("accel_")] == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("scope", ["whole", "regional"])
def test_ranks_that_compile_have_the_eager_gradient_and_reduce_once_an_update(scope, two_ranks):
    found = two_ranks["compiled"][scope]
    assert found["report"]["decision"] == scope, found["report"]["reason"]
    gradients, _, _ = right("bert-token", 8)
    assert reference.difference(found["gradients"], gradients) <= GRADIENT
    assert found["reductions"] == 3
    assert found["apart"] == 0.0
    assert 1 <= found["report"]["graphs"] <= found["report"]["budget"]


def test_ranks_see_the_same_bucket_and_the_ragged_tail_is_exact(two_ranks):
    found = two_ranks["buckets"]
    first, second = found["shapes"]
    assert [shape[1] for shape in first] == [shape[1] for shape in second]
    assert sum(shape[0] for shape in first + second) == 23
    gradients, loss, evaluation = right("bert-token", 23)
    assert reference.difference(found["gradients"], gradients) <= GRADIENT
    assert found["loss"] == pytest.approx(loss, rel=2e-6, abs=LOGGED)
    assert found["eval"]["eval_loss"] == pytest.approx(evaluation, rel=2e-6)
    assert found["eval"]["eval_rows"] == 23
