"""One window of four, and the big batch's gradients beside it: shared by the tests of the plug."""

from __future__ import annotations

from tests import reference
from tests.huggingface.heads import batch_for, model_for

SPLIT = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
RUN_PATCHES = {
    "compute_loss",
    "training_step",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "prediction_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "save_model",
    "_save_checkpoint",
    "_run_epoch",
}


def right_gradients(head="bert-token", size=4):
    return reference.gradients(model_for(head), batch_for(head, size, uneven=True), lambda m, b: m(**b).loss)
