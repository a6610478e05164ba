from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.core.session import Session
from plugins.core.step.accumulation import Window
from plugins.core.step.ema import EMA
from plugins.core.step.update import Update
from tests import processes, reference
from tests.core import ranks
from tests.core.step.updates import SGD, gradients_at_step, norm, poisoned, windows
from tests.core.tiny import FORMS, Batch, Mlp, batches, feed, joined, mlp, same, session_of, snapshot

BOUND = {torch.float32: 1e-6, torch.float64: 1e-12}


# -- equal to the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@given(
    k=st.sampled_from([1, 2, 4]),
    n=st.integers(1, 9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(list(BOUND)),
    clip=st.sampled_from([None, 0.5]),
)
def test_a_run_in_windows_is_the_run_in_big_batches(
    form: str, k: int, n: int, seed: int, dtype: torch.dtype, clip: float | None
) -> None:
    model = mlp(seed, dtype)
    parts = batches(seed, [1 + (seed + i) % 4 for i in range(n)], dtype, empty={i for i in range(n) if i % 3 == 1})
    right, average = reference.train(model, windows(parts, k), FORMS[form][0], SGD, clip, decay=0.9)
    shadow = EMA(model, 0.9, ramp=False)
    session = session_of(model, SGD(model.parameters()), k, clip_norm=clip, average=shadow)
    for part in parts:
        feed(session, model, part, form)
    session.close()
    assert reference.difference(snapshot(model), dict(right.state_dict())) <= BOUND[dtype]
    assert reference.difference(shadow.state_dict()["shadow"], average) <= BOUND[dtype]
    facts = session.report.window
    assert facts.updates == -(-n // k)
    assert facts.micro_batches == n
    assert facts.partial_windows == (n % k > 0)


def test_adam_sees_the_big_gradient_too() -> None:
    model, parts = mlp(5, torch.float64), batches(5, [2, 3, 1, 2, 4], torch.float64)
    adam = partial(torch.optim.AdamW, lr=0.01)
    right, _ = reference.train(model, windows(parts, 2), FORMS["mean"][0], adam)
    session = session_of(model, adam(model.parameters()), 2)
    for part in parts:
        feed(session, model, part)
    session.close()
    assert reference.difference(snapshot(model), dict(right.state_dict())) <= 1e-10


def test_the_host_may_close_windows_by_its_own_rule() -> None:
    model, parts = mlp(6, torch.float64), batches(6, [2] * 6, torch.float64)
    right, _ = reference.train(model, [joined(parts[:1]), joined(parts[1:3]), joined(parts[3:])], FORMS["mean"][0], SGD)
    session = session_of(model, SGD(model.parameters()), None, expected=2)
    for index, part in enumerate(parts):
        feed(session, model, part)
        if index in (0, 2, 5):
            session.close()
    assert reference.difference(snapshot(model), dict(right.state_dict())) <= 1e-12


# -- the order ---------------------------------------------------------------------


def test_the_order_of_an_update() -> None:
    """unscale, rescale and clip before the step; then the scaler, the zeroing and the average."""
    model, told = mlp(), []
    optimizer = SGD(model.parameters())

    class Scaler:
        def is_enabled(self) -> bool:
            return True

        def unscale_(self, _: Any) -> None:
            told.append("unscale")

        def step(self, opt: Any) -> None:
            told.append("step")
            assert norm([p.grad for p in model.parameters()]) == pytest.approx(0.01, rel=1e-4)
            opt.step()

        def update(self) -> None:
            told.append("scaler")

    class Average:
        def update(self) -> None:
            told.append("average")
            assert all(p.grad is None for p in model.parameters())

    update = Update(optimizer, scaler=Scaler(), clip_norm=0.01, average=Average())
    window = Window(2)
    for part in batches(0, [2, 2]):
        window.count(2)
        FORMS["mean"][0](model, part).backward()
    outcome = update.run_update(window)
    assert told == ["unscale", "step", "scaler", "average"]
    assert outcome.clipped
    assert outcome.norm > 0.01


def test_the_schedule_is_told_the_update_before_its_step() -> None:
    model, rates = mlp(), []
    optimizer = SGD(model.parameters())
    steps = gradients_at_step(optimizer)
    session = session_of(model, optimizer, 2, schedule=lambda update: rates.append((update, len(steps))))
    for part in batches(0, [2] * 5):
        feed(session, model, part)
    session.close()
    assert rates == [(0, 0), (1, 1), (2, 2)]


def test_gradients_may_stay_allocated() -> None:
    """CUDA graphs write into the gradients that were there at capture."""
    model = mlp()
    update = Update(SGD(model.parameters()), keep_gradients=lambda: True)
    FORMS["mean"][0](model, batches(0, [2])[0]).backward()
    kept = [p.grad for p in model.parameters()]
    update.run_update(Window(1))
    assert all(p.grad is g and not g.any() for p, g in zip(model.parameters(), kept, strict=True))


# -- gradient scaler ---------------------------------------------------------------------


def test_a_scaled_run_is_the_big_batch_as_well() -> None:
    model, parts = mlp(8), batches(8, [2, 3, 1, 2, 4])
    right, _ = reference.train(model, windows(parts, 2), FORMS["batch_mean"][0], SGD, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    session = session_of(model, SGD(model.parameters()), 2, clip_norm=0.5, scaler=scaler)
    for part in parts:
        feed(session, model, part, "batch_mean")
    session.close()
    assert reference.difference(snapshot(model), dict(right.state_dict())) <= 1e-6


def test_found_inf_skips_and_lowers_the_scale() -> None:
    model, parts = mlp(8), batches(8, [2, 2, 2, 2])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = session_of(model, SGD(model.parameters()), 2, scaler=scaler)
    before = snapshot(model)
    feed(session, model, parts[0])
    next(iter(model.parameters())).grad.view(-1)[0] = float("inf")
    outcome = feed(session, model, parts[1])
    assert not outcome.stepped
    assert same(snapshot(model), before)
    assert scaler.get_scale() == 512.0
    feed(session, model, parts[2])
    assert feed(session, model, parts[3]).stepped
    assert scaler.get_scale() == 512.0
    assert not same(snapshot(model), before)


def test_a_window_without_any_gradient_does_not_break_the_scaler() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = session_of(model, SGD(model.parameters()), 1, scaler=scaler)
    assert feed(session, model, batches(0, [2])[0]).stepped
    session.micro_batch(2)
    before = snapshot(model)
    assert session.backward_done() is not None
    assert same(snapshot(model), before)
    assert feed(session, model, batches(0, [2])[0]).stepped


# -- resume ---------------------------------------------------------------------


def build(norm: bool, clip: float | None = 0.5) -> tuple[Mlp, EMA, Session]:
    model = mlp(11, norm=norm)
    shadow = EMA(model, 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return model, shadow, session_of(model, optimizer, 3, clip_norm=clip, scaler=scaler, average=shadow)


@pytest.mark.parametrize("stop", range(8))
def test_a_run_saved_anywhere_goes_on_bit_for_bit(stop: int) -> None:
    """Also in the middle of a window, and of one that will be skipped; the file loads with weights_only."""

    def parts() -> list[Batch]:
        return poisoned(batches(11, [3, 4, 3, 4, 3, 4, 3, 4]), 4)

    def noisy(part: Batch) -> Batch:
        return Batch(part.x + 0.01 * torch.randn_like(part.x), part.y, part.s)

    torch.manual_seed(1)
    model, shadow, session = build(norm=True)
    torch.manual_seed(1)
    for part in parts():
        feed(session, model, noisy(part), "batch_mean")
    session.close()
    right = session.state_dict()

    first, _, half = build(norm=True)
    torch.manual_seed(1)
    for part in parts()[:stop]:
        feed(half, first, noisy(part), "batch_mean")
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    torch.manual_seed(77)
    again, average, rest = build(norm=True)
    state = torch.load(file, weights_only=True)
    rest.load_state_dict(state)
    rest.files.set_random_state(state["random"])
    for part in parts()[stop:]:
        feed(rest, again, noisy(part), "batch_mean")
    rest.close()
    ours = rest.state_dict()
    assert ours.keys() == right.keys()
    for name in right:
        assert same(ours[name], right[name]), name
    assert average.updates == shadow.updates == 2
    assert ours["counts"]["skipped_updates"] == 1


# -- ranks ---------------------------------------------------------------------


def test_two_ranks_of_unequal_micro_batches_are_one_big_batch(tmp_path: Path) -> None:
    processes.run("tests.core.ranks:train", tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    data = [batches(rank, ranks.SIZES[rank], torch.float64, ranks.EMPTY[rank]) for rank in (0, 1)]
    bigs = [joined([*data[0][at : at + 2], *data[1][at : at + 2]]) for at in (0, 2, 4)]
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1)
    for form in FORMS:
        ours, theirs = (f[form] for f in found)
        assert same(ours["model"], theirs["model"])
        # One reduction of gradients an update, three updates; the small ones are of counts.
        assert len(ours["large"]) == len(theirs["large"]) == 3
        assert len(ours["small"]) <= 3 + 1
        right, _ = reference.train(mlp(3, torch.float64), bigs, FORMS[form][0], sgd)
        extra = ours["model"].pop("extra")
        assert reference.difference(ours["model"], dict(right.state_dict())) <= 1e-12
        # Decay moves a parameter only if a rank reached it: in the first update, of the form where one did.
        moved = 1 - 0.01 * 0.1 if form == ranks.REACHES_EXTRA else 1.0
        assert float(extra[0]) == pytest.approx(moved, rel=1e-12)
