from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ultralytics.conftest import Train, same, tensors


def poison(at: int) -> Callable[[Any], None]:
    """`on_train_start`: the image of micro-batch `at` is NaN."""

    def hold(trainer: Any) -> None:
        through, count = trainer.preprocess_batch, iter(range(10**6))

        def preprocess(batch: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = through(batch)
            if next(count) == at:
                found["img"] = found["img"] * float("nan")
            return found

        trainer.preprocess_batch = preprocess

    return hold


@pytest.mark.parametrize("at", [0, 1, 2, 5, 7])
def test_a_nan_batch_leaves_no_trace(at: int, train: Train) -> None:
    """Two epochs of four micro-batches, K = 2: the window of `at` is skipped, everything else goes on."""
    states: list[tuple[dict[str, Any], dict[str, Any], int]] = []

    def note(trainer: Any) -> None:
        states.append((tensors(trainer.model), tensors(trainer.ema.ema), trainer.ema.updates))

    run = train(
        accel={"accumulate": 2},
        epochs=2,
        callbacks={
            "on_train_start": lambda t: (poison(at)(t), note(t)),  # type: ignore[func-returns-value]
            "on_train_batch_end": note,
        },
    )
    window = at // 2
    before, after = states[2 * window], states[2 * window + 2]
    assert same(after[0], before[0])
    assert same(after[1], before[1])
    assert after[2] == before[2]
    assert all(t.isfinite().all() for t in run.weights.values())
    assert all(t.isfinite().all() for t in run.average.values())
    facts = run.report["window"]
    assert (facts["updates"], facts["skipped_updates"]) == (3, 1)
    assert len(run.spy.updates) == 3
    if window < 3:
        assert not same(states[-1][0], after[0])  # training went on
    assert sum("was skipped" in w for w in run.report["warnings"]) == 1


def test_the_host_s_recovery_after_a_nan_score_goes_on_with_clean_files(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host then copies the live model into a new average, which it pickles: nothing of ours may be in it."""
    scores: list[float] = []

    def spoil(trainer: Any) -> None:
        if trainer.epoch == 1 and not scores:
            scores.append(1.0)
            through = trainer.validate

            def validate() -> Any:
                trainer.validate = through
                metrics, _ = through()
                return metrics, float("nan")

            trainer.validate = validate

    run = train(
        accel={"accumulate": 3, "ema": 0.5},
        epochs=3,
        val=True,
        callbacks={"on_train_epoch_end": spoil},
    )
    assert scores
    assert run.report["window"]["dropped_micro_batches"] == 2  # 8 micro-batches by then: 3 + 3 + 2
    saved = torch.load(run.folder / "weights" / "last.pt", weights_only=False)
    assert (saved["model"] or saved["ema"]).__class__.__module__ == "ultralytics.nn.tasks"
    assert "loss" not in vars(saved["model"] or saved["ema"])
    assert run.trainer.ema.decay(1e9) == pytest.approx(0.5)
