from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plugins.core.plan import Plan
from plugins.core.trial import OperatorTimes, fusable_share, time_steps
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
