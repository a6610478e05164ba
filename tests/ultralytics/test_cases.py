"""The public cases of ultralytics/ultralytics, each with its right value. (9199 is in test_command.py.)"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.ultralytics.conftest import Run, Train, same, tensors
from tests.ultralytics.spy import Spy


@pytest.mark.parametrize("clip", [0.1, "off", "host"])
def test_24320_clipping_is_set_once_an_update(clip: Any, train: Train) -> None:
    """The norm is measured after accumulation, as the optimizer sees it; `off` leaves gradients untouched."""
    options = {"accumulate": 4, "batchnorm": "freeze"}
    run = train(accel={**options, "clip_norm": clip}, images=32, epochs=2, cls=50.0, box=50.0)
    free = train(accel={**options, "clip_norm": "off"}, images=32, epochs=1, cls=50.0, box=50.0, name="free")
    limit = {0.1: 0.1, "off": float("inf"), "host": 10.0}[clip]
    assert len(run.spy.norms) == 4
    assert max(run.spy.norms) <= limit * (1 + 1e-5)
    assert min(run.spy.norms) > 0.05
    assert free.spy.norms[0] > 10.0  # there is something to clip
    if clip == "off":
        assert same(run.spy.updates[0].gradients, free.spy.updates[0].gradients)
    assert run.report["gradients"]["clip_norm"] == (None if clip == "off" else limit)
    assert run.report["gradients"]["clipped_fraction"] == (0.0 if clip == "off" else 1.0)


def test_16301_accumulate_is_set_and_seen(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    """10 images, batch 2, K = 4, 3 epochs: 15 micro-batches are 4 updates, the last one of 3."""
    with caplog.at_level(logging.INFO, "ultralytics"):
        run = train(accel={"accumulate": 4, "batchnorm": "freeze", "clip_norm": "off"}, images=10, batch=2, epochs=3)
    assert "accel: 4 x 2 = 8 images an update" in caplog.text
    facts = run.report["window"]
    assert (facts["accumulate"], facts["micro_batch"], facts["effective_batch"]) == (4, 2, 8)
    assert (facts["micro_batches"], facts["updates"], facts["partial_windows"]) == (15, 4, 1)
    assert len(run.spy.updates) == 4


def test_16301_the_tail_is_weighted_by_its_own_images(train: Train) -> None:
    run = train(
        accel={"accumulate": 4, "batchnorm": "freeze", "clip_norm": "off"},
        images=10,
        batch=2,
        epochs=3,
        spy=Spy(heavy=True),
    )
    assert [len(u.batches) for u in run.spy.updates] == [4, 4, 4, 3]
    assert all(u.off() <= 1e-6 for u in run.spy.updates)


def test_11217_the_tail_of_the_last_epoch_is_not_lost(train: Train) -> None:
    run = train(accel={"accumulate": 4}, images=10, batch=2, epochs=1, spy=Spy(heavy=True))
    assert [len(u.batches) for u in run.spy.updates] == [4, 1]
    assert run.report["window"]["dropped_micro_batches"] == 0


def test_the_tail_is_in_the_weights_that_a_callback_finds_at_the_end_of_the_last_epoch(train: Train) -> None:
    found = {}

    def weights(trainer):
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    def note(trainer):
        found["at the end of the epoch"] = weights(trainer)
        trainer.ema.ema.model[0].conv.weight.data[0] = 1.0e5  # as in the host's own test of checkpoints

    run = train(accel={"accumulate": 4}, images=10, batch=2, epochs=1, callbacks={"on_train_epoch_end": note})
    last = weights(run.trainer)
    assert all(torch.equal(value, last[name]) for name, value in found["at the end of the epoch"].items())
    assert run.trainer.ema.ema.model[0].conv.weight[0].unique().tolist() == [1.0e5]


def test_18473_four_by_four_is_one_by_sixteen(train: Train) -> None:
    """One micro-batch without any object. (fp64 to 1e-12: test_losses.py.)"""
    run = train(
        accel={"accumulate": 4, "batchnorm": "freeze", "clip_norm": "off"},
        images=16,
        empty=tuple(range(14)),
        spy=Spy(heavy=True),
    )
    (update,) = run.spy.updates
    assert sorted(len(b["cls"]) > 0 for b in update.batches)[0] is False
    assert update.off() <= 1e-6


# 25428 (killed, disk full): test_checkpointing_killed.py; 9426 (resume): test_checkpointing.py; 21996 (shapes):
# test_compiled.py; 16838: test_plug.py; 1516 (export and keys of a compiled run): test_checkpointing.py and below.


def test_1516_a_compiled_run_s_best_exports_in_a_process_without_the_plug(train: Train, tmp_path: Any) -> None:
    from tests.ultralytics.conftest import without_plug
    from tests.ultralytics.saved import ALONE

    run = train(accel={"compile": "on", "compile_backend": "eager", "accumulate": 2}, epochs=1)
    assert run.report["compile"]["decision"] == "whole"
    best = run.folder / "weights" / "best.pt"
    done = without_plug("-c", ALONE, str(best), "export", cwd=tmp_path)
    assert "exported" in done.stdout, done.stderr
    raw = best.read_bytes()
    assert b"_orig_mod" not in raw
    assert b"plugins" not in raw
    assert b"integrations" not in raw


@pytest.mark.parametrize("rule", ["skip", "stop"])
def test_16329_an_infinite_gradient_in_one_micro_batch(rule: str, train: Train) -> None:
    states: list[tuple[dict[str, Any], dict[str, Any], int]] = []

    def note(trainer: Any) -> None:
        states.append((tensors(trainer.model), tensors(trainer.ema.ema), trainer.ema.updates))

    def inject(trainer: Any) -> None:
        note(trainer)
        count = iter(range(10**6))
        weight = trainer.model.model[0].conv.weight
        weight.register_hook(lambda g: g + float("inf") if next(count) == 3 else g)

    def run() -> Run:
        return train(
            accel={"accumulate": 2, "nonfinite": rule},
            epochs=2,
            callbacks={"on_train_start": inject, "on_train_batch_end": note},
        )

    if rule == "stop":
        from plugins.errors import AccelError

        with pytest.raises(AccelError, match=r"^gradient norm is inf and nonfinite=stop; [^\n]+$"):
            run()
        return
    done = run()
    assert done.report["window"]["skipped_updates"] == 1
    assert done.report["window"]["updates"] == 3
    before, after = states[2], states[4]
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    assert before[2] == after[2] == 1
    assert done.trainer.ema.updates == 3
    assert all(t.isfinite().all() for t in done.weights.values() if torch.is_floating_point(t))
