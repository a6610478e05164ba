"""The real trainer with the plug, update by update, against one big batch and against the host alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests import reference
from tests.ultralytics.conftest import BATCHNORM, PLAIN, Train, freeze_batchnorm, same
from tests.ultralytics.spy import Spy

# -- exactness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulate", "images", "empty", "windows"),
    [
        (1, 8, (), [4, 4]),
        (2, 16, (3,), [8, 8]),
        (4, 16, (), [16]),
        (4, 18, (0, 1, 2, 3, 4, 5), [16, 2]),
        (3, 10, (), [10]),
    ],
)
def test_every_update_has_the_big_batch_s_gradients(
    accumulate: int, images: int, empty: tuple[int, ...], windows: list[int], train: Train
) -> None:
    run = train(
        accel={"accumulate": accumulate, "batchnorm": "freeze", "clip_norm": "off"},
        images=images,
        empty=empty,
        spy=Spy(heavy=True),
    )
    assert [sum(len(b["img"]) for b in u.batches) for u in run.spy.updates] == windows
    for update in run.spy.updates:
        assert update.off() <= 1e-6
    assert run.report["window"]["exact"] is True


def test_a_micro_batch_without_any_object(train: Train) -> None:
    run = train(
        accel={"accumulate": 4, "batchnorm": "freeze", "clip_norm": "off"},
        empty=tuple(range(14)),
        spy=Spy(heavy=True),
    )
    (update,) = run.spy.updates
    assert any(len(b["cls"]) == 0 for b in update.batches)
    assert len({len(b["cls"]) for b in update.batches}) > 1
    assert update.off() <= 1e-6


WHOLE: dict[str, Any] = {"images": 32, "epochs": 3, "warmup_epochs": 2, "nbs": 16, "weight_decay": 0.05, "cls": 20.0}


def test_the_whole_run_equals_the_host_on_big_batches(train: Train) -> None:
    """Warm-up, schedule, weight decay, clipping and EMA included: batch=4 accumulate=4 against batch=16."""
    big = train(batch=16, name="big", callbacks={"on_train_batch_start": freeze_batchnorm}, **WHOLE)
    ours = train(batch=4, accel={"accumulate": 4, "batchnorm": "freeze"}, **WHOLE)
    assert len(big.spy.updates) == len(ours.spy.updates) == 6
    assert any(norm > 9.99 for norm in big.spy.norms)  # so that clipping is a part of it
    for a, b in zip(ours.spy.updates, big.spy.updates, strict=True):
        assert a.rates == pytest.approx(b.rates, rel=1e-12)
        assert a.decays == pytest.approx(b.decays, rel=1e-12)
        assert reference.difference(a.gradients, b.gradients) <= 1e-5
    assert reference.difference(ours.weights, big.weights) <= 1e-6
    assert reference.difference(ours.average, big.average) <= 1e-6
    assert ours.trainer.ema.updates == big.trainer.ema.updates == 6


def test_weight_decay_follows_the_effective_batch(train: Train) -> None:
    run = train(accel={"accumulate": 2}, weight_decay=0.8, nbs=64)
    assert sorted(run.spy.updates[0].decays) == pytest.approx([0.0, 0.0, 0.8 * 8 / 64])


def test_effective_batch_is_the_same_as_its_accumulate(train: Train) -> None:
    a = train(accel={"accumulate": 4}, name="a", epochs=2)
    b = train(accel={"effective_batch": 16}, name="b", epochs=2)
    assert same(a.weights, b.weights)
    assert b.report["window"]["effective_batch"] == 16


@pytest.mark.parametrize("accel", [{}, {"accumulate": 1}], ids=["default", "accumulate=1"])
def test_the_plug_alone_changes_no_bit(accel: dict[str, Any], train: Train) -> None:
    """The same random numbers, order and arithmetic, all augmentation on, where the host's K is 1."""
    host: dict[str, Any] = {
        "nbs": 4,
        "epochs": 3,
        "warmup_epochs": 1,
        "images": 10,
        "val": True,
        "mosaic": 1.0,
        "fliplr": 0.5,
        "hsv_h": 0.1,
        "close_mosaic": 1,
        "multi_scale": 0.5,
    }
    alone = train(name="alone", **host)
    ours = train(accel=accel, **host)
    assert same(ours.weights, alone.weights)
    assert same(ours.average, alone.average)
    assert len(ours.spy.updates) == len(alone.spy.updates) == 9


def test_the_host_s_windows_are_kept(train: Train) -> None:
    """`accumulate=host` with the host's sum is the host bit for bit, its ramp in warm-up included."""
    host: dict[str, Any] = {"nbs": 12, "epochs": 4, "warmup_epochs": 1, "images": 12, "batch": 4}
    windows: dict[str, list[int]] = {}

    def noted(name: str, spy: Spy) -> dict[str, Any]:
        windows[name] = []
        note = {"on_train_batch_end": lambda _: windows[name].append(len(spy.updates))}
        return {"name": name, "spy": spy, "callbacks": note}

    alone = train(**noted("alone", Spy()), **host)
    ours = train(**noted("ours", Spy()), accel={"normalise": "host"}, **host)
    assert windows["alone"] == windows["ours"] == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5]
    assert same(ours.weights, alone.weights)
    assert same(ours.average, alone.average)
    assert ours.report["window"]["partial_windows"] == 0


def test_the_host_s_windows_are_exact_and_their_tail_is_not_lost(train: Train) -> None:
    run = train(
        accel={"batchnorm": "freeze", "clip_norm": "off"},
        nbs=16,
        epochs=3,
        warmup_epochs=1,
        images=12,
        spy=Spy(heavy=True),
    )
    sizes = [len(u.batches) for u in run.spy.updates]
    assert sum(sizes) == 9
    assert max(sizes) == 4
    assert sizes == sorted(sizes[:-1]) + sizes[-1:]
    for update in run.spy.updates:
        assert update.off() <= 1e-6


def test_multi_scale_draws_once_a_window(train: Train) -> None:
    run = train(
        accel={"accumulate": 4, "batchnorm": "freeze", "clip_norm": "off"},
        images=32,
        epochs=2,
        multi_scale=0.5,
        spy=Spy(heavy=True),
    )
    shapes = [{tuple(b["img"].shape[2:]) for b in u.batches} for u in run.spy.updates]
    assert all(len(s) == 1 for s in shapes)
    assert len(set().union(*shapes)) > 1
    for update in run.spy.updates:
        assert update.off() <= 1e-6


# -- the way back -------------------------------------------------------------------------------------------------


def put_on(trainer: Any) -> set[str]:
    return {n for n in vars(trainer) if callable(getattr(trainer, n)) and hasattr(type(trainer), n)}


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_undone_on_errors_too(fails: bool, train: Train) -> None:
    kept: list[Any] = []
    during: list[set[str]] = []

    def keep(trainer: Any) -> None:
        kept.append(trainer)
        during.append(put_on(trainer))

    def fail(trainer: Any) -> None:
        if fails and trainer.epoch == 1:
            raise RuntimeError("mine")

    def run() -> None:
        train(
            accel={"accumulate": 2, "batchnorm": "momentum", "compile": "on", "compile_backend": "eager"},
            epochs=2,
            callbacks={"on_train_start": keep, "on_train_batch_end": fail},
        )

    if fails:
        with pytest.raises(RuntimeError, match="mine"):
            run()
    else:
        run()
    (trainer,) = kept
    assert {"optimizer_step", "preprocess_batch", "save_model", "final_eval", "validate"} <= during[0]
    assert put_on(trainer) == set()
    assert "loss" not in vars(trainer.model)
    assert "_compiled_call_impl" not in vars(trainer.model)
    assert {m.momentum for m in trainer.model.modules() if isinstance(m, BATCHNORM)} == {0.03}
    criterion = trainer.model.criterion
    assert "loss" not in vars(criterion)
    assert isinstance(criterion.assigner, nn.Module)
    assert type(trainer.last) is type(trainer.save_dir)
    assert all("Adapter" not in repr(f) for fs in trainer.callbacks.values() for f in fs)
    assert trainer.accel is None
    assert (trainer.save_dir / "accel_report.json").is_file()
    assert (trainer.save_dir / "accel_report.html").is_file()


def test_plain_settings_are_plain() -> None:
    """The spelling of the host's augmentation switches is still known to the host."""
    from ultralytics.utils import DEFAULT_CFG_DICT

    assert set(PLAIN) <= set(DEFAULT_CFG_DICT)


def test_an_effective_batch_over_a_batch_that_the_host_finds_is_rounded_up(train: Train) -> None:
    """`batch=-1`: on a CPU the host takes 16."""
    window = train(accel={"effective_batch": 24}, batch=-1, images=18, epochs=2).report["window"]
    assert (window["micro_batch"], window["accumulate"], window["effective_batch"]) == (16, 2, 32)
