"""One update of an uneven window, and the big batch beside it: shared by the tests of users' own losses."""

from __future__ import annotations

from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.runs import report, trainer_for

SIZE = 8
SPLIT = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 4,
    "max_steps": 1,
}


def ours(head, folder, plug=True, **more):
    return trainer_for(head, folder, SIZE, plug=plug, options={"buckets": "off"}, **{**SPLIT, **more})


def right(head, model=None):
    """(gradients, loss) of the big batch."""
    model = model if model is not None else model_for(head)
    loss = model(**batch_for(head, SIZE, uneven=True)).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(loss.detach())


def named(folder):
    return report(folder)["window"]["approximate_terms"]
