"""What a user's own evaluation gives is what `evaluate()` says; the loop sees the host's batches."""

from __future__ import annotations

import pytest
import torch
import transformers as t

from tests.huggingface.runs import trainer_for


class OwnLoop(t.Trainer):
    """Doubles the loss, and notes how wide its batches are."""

    def evaluation_loop(self, dataloader, *args, **kwargs):
        self.widths = [batch["input_ids"].shape for batch in dataloader]
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        output.metrics["eval_loss"] *= 2
        return output


class OwnStep(t.Trainer):
    """Gives the share of wrong tokens as the loss."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            logits = model(**inputs).logits
        kept = inputs["labels"] != -100
        wrong = (logits.argmax(-1) != inputs["labels"])[kept].float().mean()
        return wrong, logits, inputs["labels"]


class PassesOn(t.Trainer):
    """Calls the host's step, and does something beside it."""

    def prediction_step(self, *args, **kwargs):
        return super().prediction_step(*args, **kwargs)


def evaluated(kind, folder, plug):
    trainer, _ = trainer_for("bert-token", folder, 8, plug=plug, kind=kind, per_device_eval_batch_size=3)
    return trainer, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("kind", [OwnLoop, OwnStep])
def test_the_loss_of_an_own_loop_or_prediction_step_is_as_the_user_gives_it(kind, tmp_path):
    _, alone = evaluated(kind, tmp_path / "alone", plug=False)
    trainer, plugged = evaluated(kind, tmp_path / "plugged", plug=True)
    assert plugged == pytest.approx(alone, rel=1e-6)
    if kind is OwnLoop:
        assert [shape[0] for shape in trainer.widths] == [3, 3, 2]


def test_a_prediction_step_that_calls_the_host_s_has_the_true_mean(tmp_path):
    _, true = evaluated(t.Trainer, tmp_path / "plain", plug=True)
    _, alone = evaluated(t.Trainer, tmp_path / "alone", plug=False)
    _, found = evaluated(PassesOn, tmp_path / "own", plug=True)
    assert found == pytest.approx(true, rel=1e-6) != pytest.approx(alone, rel=1e-4)


def test_a_users_metric_called_loss_takes_the_place_of_the_loss_as_with_the_host(tmp_path):
    found = []
    for plug in (True, False):
        trainer, _ = trainer_for("bert-token", tmp_path / str(plug), 8, plug=plug, per_device_eval_batch_size=3,
                                 extra={"compute_metrics": lambda prediction: {"loss": 7.0, "seen": 1.0}})  # fmt: skip
        metrics = trainer.evaluate()
        found.append({name: metrics[name] for name in ("eval_loss", "eval_seen")})
    assert found[0] == found[1] == {"eval_loss": 7.0, "eval_seen": 1.0}
