from __future__ import annotations

import collections
import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from plugins.core.autotune import cost_model
from plugins.core.autotune.timing import OperatorTimes, attributes_kept, fusable_share, time_in_turn, time_steps
from plugins.core.plan import Plan
from tests.core.planned import Clock, Host, by_name
from tests.core.tiny import CPU


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(Clock(monkeypatch), by_name(host=1.0, bf16=0.25))
    made.x = torch.rand(made.shape)
    return made


def clear(host: Host) -> None:
    host.model.zero_grad(set_to_none=True)


def timed(host: Host, plan: Plan, **given: object) -> object:
    return time_steps(host, plan, CPU, lambda: clear(host), host.said.append, **given)  # type: ignore[arg-type]


def test_steps_are_timed_after_one_that_is_not(host: Host) -> None:
    timing = timed(host, Plan("bf16"), repeats=3)
    assert (timing.first, timing.seconds, len(timing.losses)) == (0.25, [0.25] * 3, 4)  # type: ignore[attr-defined]
    assert host.plan == Plan("bf16")
    timing = timed(host, Plan(), repeats=3, warm=False)
    assert (timing.first, timing.seconds, len(timing.losses)) == (0.0, [1.0] * 3, 3)  # type: ignore[attr-defined]


def test_no_gradient_stays_and_no_weight_moves(host: Host) -> None:
    before = [p.clone() for p in host.model.parameters()]
    timed(host, Plan("bf16"))
    assert all(p.grad is None for p in host.model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(host.model.parameters(), before, strict=True))


def test_a_hopeless_first_step_is_the_last(host: Host) -> None:
    assert timed(host, Plan(), hopeless=0.5) is None
    assert host.losses == 1
    assert timed(host, Plan(), warm=False, hopeless=0.5) is not None  # nothing is hopeless that runs anyway


@pytest.mark.parametrize(
    ("error", "word"),
    [(torch.OutOfMemoryError("32 GiB\nand more"), "out of memory"), (RuntimeError("x\ny"), "RuntimeError")],
)
def test_a_plan_that_fails_is_one_line(host: Host, error: Exception, word: str) -> None:
    host.fails = lambda plan: error
    assert timed(host, Plan("bf16")) is None
    assert host.said == [f"plan bf16: dropped, {word} in its trial"]


def test_operators_that_fuse_are_counted_in_forward_and_backward() -> None:
    seen: list[str] = []

    class Names(OperatorTimes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.overloadpacket.__name__)
            return super().__torch_dispatch__(func, types, args, kwargs)

    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    with Names(CPU) as times:
        model(torch.rand(4, 8)).sum().backward()
    assert {"addmm", "silu", "silu_backward", "mm"} <= set(seen)
    assert 0 <= times.fusable <= times.total


@pytest.mark.parametrize("matrix", [True, False])
def test_the_fusable_share_leaves_out_matrix_products(monkeypatch: pytest.MonkeyPatch, matrix: bool) -> None:
    ticks = iter(range(10_000))

    class Trial:
        def loss(self) -> Tensor:
            x = torch.rand(4, 4, requires_grad=True)
            return ((x @ x) if matrix else (x * x)).sum()

    init = OperatorTimes.__init__

    def with_ticks(self: OperatorTimes, device: torch.device) -> None:
        init(self, device)
        self.clock = lambda: float(next(ticks))

    monkeypatch.setattr(OperatorTimes, "__init__", with_ticks)
    share = fusable_share(Trial(), CPU, lambda: None)  # type: ignore[arg-type]
    assert 0.0 < share < 1.0
    assert (share < 0.8) is matrix


class InAutocast:
    """A trial inside a host's autocast, whose cache of cast weights outlives a step."""

    host_precision = "bf16"

    def __init__(self) -> None:
        self.conv = nn.Conv2d(4, 8, 3)
        self.layouts: list[tuple[str, bool]] = []
        self.layout = "host"

    def apply(self, precision: str, memory_format: str) -> None:
        self.layout = memory_format
        last = memory_format == "channels_last"
        self.conv.to(memory_format=torch.channels_last if last else torch.contiguous_format)

    def loss(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = self.conv(torch.ones(2, 4, 8, 8))
        self.layouts.append((self.layout, found.is_contiguous(memory_format=torch.channels_last)))
        return found.float().mean()

    def bare(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_a_step_does_not_find_the_weights_that_the_one_before_cast() -> None:
    """In another plan's layout they would make it that plan."""
    trial = InAutocast()
    plans = [Plan("bf16"), Plan("bf16", "channels_last"), Plan("bf16")]
    with torch.autocast("cpu", enabled=False):
        for plan in plans:
            time_steps(trial, plan, CPU, lambda: None, pytest.fail, repeats=1)
    assert trial.layouts == [("host", False)] * 2 + [("channels_last", True)] * 2 + [("host", False)] * 2


def test_plans_are_timed_there_and_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slows the first half slows them alike."""
    monkeypatch.setattr(cost_model, "HOPELESS", math.inf)  # a step of microseconds may take a hundred times as long
    trial = InAutocast()
    found = time_in_turn(trial, [Plan(), Plan("bf16", "channels_last"), Plan("bf16")], CPU, lambda: None, pytest.fail)
    assert [timing.plan.name for timing in found] == ["host", "bf16 + channels_last", "bf16"]
    assert [len(timing.seconds) for timing in found] == [2, 2, 2]
    steps = [layout for layout, _ in trial.layouts]
    last = "channels_last"
    assert steps == ["host", last, last, "host", "host", "host", last, "host"]


class Remembers(torch.nn.Linear):
    """Keeps plain attributes of many kinds, and an object that nobody can look into."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.widths, self.latest = 0, [3], torch.zeros(2)
        self.queue, self.by_name = torch.zeros(2), {"x": [1]}
        self.seen = collections.Counter(a=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.widths.append(x.shape[1])
        self.seen["a"] += 1
        self.by_name["y"] = []
        self.latest = super().forward(x)
        self.queue += 1
        self.mask = torch.ones(2)
        return self.latest


def test_what_a_model_keeps_in_plain_attributes_is_as_before_a_trial() -> None:
    model = torch.nn.Sequential(Remembers(), torch.nn.Linear(2, 2))
    own = model[0]
    held = (own.widths, own.latest, own.queue)
    with attributes_kept(model):
        model(torch.ones(1, 2))
        assert (own.calls, float(own.mask.sum())) == (1, 2.0)
    assert (own.calls, own.widths, own.seen, own.by_name) == (0, [3], {"a": 1}, {"x": [1]})
    assert own.queue.sum() == 0
    assert not hasattr(own, "mask")
    assert all(a is b for a, b in zip(held, (own.widths, own.latest, own.queue), strict=True))
