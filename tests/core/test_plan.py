from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.core.autotune import cost_model
from plugins.core.plan import SCOPES, Plan, Timing
from tests.core.planned import Blocks, Net
from tests.core.tiny import CPU

CUDA = torch.device("cuda")
SECONDS = st.floats(1e-4, 10)
PLANS = st.builds(
    Plan,
    st.sampled_from(["host", "bf16"]),
    st.sampled_from(["host", "channels_last"]),
    st.sampled_from(SCOPES),
)


@given(PLANS)
def test_a_plan_is_written_and_read(plan: Plan) -> None:
    assert Plan.from_dict(plan.as_dict()) == plan


@pytest.mark.parametrize("data", [{"precision": "fp8"}, {"compile": "on"}, {"speed": "high"}, {"memory_format": None}])
def test_a_plan_of_unknown_fields_or_values_is_refused(data: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(data))):
        Plan.from_dict(data)


def test_names() -> None:
    assert Plan().name == "host"
    assert Plan("bf16", "channels_last", "regional").name == "bf16 + channels_last + regional compile"


# -- the spread ---------------------------------------------------------------------------------------------------


@given(st.lists(SECONDS, min_size=2, max_size=5), st.lists(SECONDS, min_size=2, max_size=5))
def test_a_winner_is_faster_by_both_spreads_and_never_both_win(ours: list[float], theirs: list[float]) -> None:
    a, b = Timing(Plan(), ours), Timing(Plan(), theirs)
    assert not (a.beats(b) and b.beats(a))
    assert not a.beats(a)
    if a.beats(b):
        assert a.middle + a.spread < b.middle - b.spread


def test_two_steps_that_overlap_decide_nothing() -> None:
    assert not Timing(Plan(), [0.8, 1.0]).beats(Timing(Plan(), [0.9, 1.1]))
    assert Timing(Plan(), [0.8, 0.82]).beats(Timing(Plan(), [0.9, 1.1]))


def test_one_slow_step_of_five_does_not_hide_a_winner() -> None:
    assert Timing(Plan(), [0.6, 0.6, 0.61, 0.6, 9.0]).beats(Timing(Plan(), [1.0, 1.0, 1.01, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("precision", "off", "agrees"),
    [
        ("host", 1e-4, True),
        ("host", 1e-2, False),
        ("bf16", 1e-2, True),
        ("bf16", 0.2, False),
        ("bf16", math.nan, False),
    ],
)
def test_the_same_batchs_loss_is_the_same_to_its_precision(precision: str, off: float, agrees: bool) -> None:
    right = Timing(Plan(), [1.0], [5.0, 5.0])
    assert Timing(Plan(precision), [1.0], [5.0 * (1 + off)] * 3).agrees(right) is agrees


def test_losses_that_dropout_scatters_agree_within_their_ranges() -> None:
    right = Timing(Plan(), [1.0], [5.0, 5.4])
    assert Timing(Plan(), [1.0], [5.6, 5.3, 5.9]).agrees(right)
    assert not Timing(Plan(), [1.0], [9.6, 9.3, 9.9]).agrees(right)


# -- what is worth a trial ----------------------------------------------------------------------------------------


def test_layouts_by_model_device_and_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: True)
    both = frozenset({"precision", "memory_format"})
    assert cost_model.layouts(Net(), CPU, Plan(), both) == [
        Plan("bf16", "channels_last"), Plan("host", "channels_last"), Plan("bf16"),
    ]  # fmt: skip
    assert cost_model.layouts(Blocks(), CPU, Plan(), both) == [Plan("bf16")]
    assert cost_model.layouts(Net(), CPU, Plan("fp32"), frozenset({"memory_format"})) == [Plan("fp32", "channels_last")]
    assert cost_model.layouts(Net(), CPU, Plan(), frozenset()) == []
    monkeypatch.setattr(cost_model, "bf16_is_fast", lambda device: False)
    assert cost_model.layouts(Net(), CPU, Plan(), both) == [Plan("host", "channels_last")]


@given(st.integers(0, 5000), SECONDS, st.integers(0, 4), st.floats(0, 5))
def test_trials_cost_at_most_two_percent_of_what_is_left(left: int, step: float, count: int, spent: float) -> None:
    candidates = [Plan("bf16")] * count
    tried = cost_model.affordable(candidates, step, left, spent)
    plain = cost_model.REPEATS * step
    cost = plain + len(tried) * (1 + cost_model.REPEATS) * cost_model.EXPECTED * step
    assert len(tried) <= count
    if tried:
        assert spent + cost <= cost_model.TRIAL_SHARE * left * step * (1 + 1e-9)
    elif count:
        assert spent + cost + 3 * cost_model.EXPECTED * step > cost_model.TRIAL_SHARE * left * step * (1 - 1e-9)


# -- compile ------------------------------------------------------------------------------------------------------


def test_blocks_that_look_alike_are_compiled_once() -> None:
    one, three = (cost_model.compile_seconds(list(Blocks(depth).blocks), CPU) for depth in (1, 3))
    assert one == three
    assert cost_model.compile_seconds([Net()], CPU) > one


def test_what_never_pays_on_a_cpu() -> None:
    assert "convolutions" in cost_model.cannot_gain([Net()], CPU)
    assert cost_model.cannot_gain([Blocks()], CPU) == ""
    assert cost_model.cannot_gain([Net()], CUDA) == ""
    assert "12% of a step" in cost_model.too_little_to_fuse(0.12, CPU, "bf16")
    assert cost_model.too_little_to_fuse(0.4, CPU, "bf16") == ""
    assert cost_model.too_little_to_fuse(0.12, CPU, "host") == ""
    assert cost_model.too_little_to_fuse(0.12, CUDA, "bf16") == ""


@given(st.floats(0.1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_a_compile_needs_a_run_that_is_long_enough(cost: float, fusable: float, more: float) -> None:
    needed = cost_model.seconds_to_pay(cost, fusable)
    assert cost <= cost_model.COMPILE_SHARE * needed * (1 + 1e-9)  # within its share
    assert cost <= cost_model.GAIN * max(fusable, 1e-6) * needed * (1 + 1e-9)  # and won back
    assert cost_model.seconds_to_pay(cost, min(fusable + more, 1.0)) <= needed
    assert cost_model.seconds_to_pay(2 * cost, fusable) == pytest.approx(2 * needed)


@given(SECONDS, SECONDS, SECONDS, st.integers(0, 1000), st.integers(1, 8))
def test_break_even_is_where_the_saved_seconds_reach_the_cost(
    cost: float, plain: float, compiled: float, update: int, size: int
) -> None:
    at = cost_model.break_even(cost, plain, compiled, update, size)
    saved = (plain - compiled) * size
    if saved <= 0:
        assert at is None
    else:
        assert at is not None
        assert (at - update) * saved >= cost * (1 - 1e-9)
        assert (at - update - 1) * saved < cost * (1 + 1e-9)


@given(st.integers(0, 100_000))
def test_judging_a_compile_takes_two_to_five_steps_a_side(left: int) -> None:
    assert cost_model.REPEATS <= cost_model.repeats(left) <= 5
    assert cost_model.repeats(left) <= max(left / 300, cost_model.REPEATS)


@given(SECONDS, st.floats(0, 1), st.floats(0, 1e4), st.booleans())
def test_a_worker_has_its_share_of_the_run_and_some_patience(
    cost: float, fusable: float, left: float, waits: bool
) -> None:
    found = cost_model.budget(cost, fusable, left, waits)
    assert found >= max(cost_model.compile_share(fusable) * left, cost)
    assert found <= cost_model.budget(cost, fusable, left, False)


def test_a_loss_that_is_not_finite_is_none_in_json() -> None:
    for loss, written in ((math.nan, None), (math.inf, None), (2.0, 2.0)):
        assert Timing(Plan(), [1.0], [loss]).as_dict()["loss"] == written
