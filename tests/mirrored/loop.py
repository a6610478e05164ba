"""A hand-written loop with `Accelerated` on mirror: equal to the CPU's, without a read of its own per micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.core.autotune import cost_model
from plugins.core.system import devices
from plugins.loop import Accelerated
from tests import mirror
from tests.core.tiny import same

DEVICE = torch.device("mirror", 0)
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS: dict[str, Any] = {"plan": "off", "compile": "off", "memory_format": "host", "say": lambda line: None}
SIZES = (4, 3, 4, 2, 4, 4, 3)  # images of the micro-batches: two windows of three, and a tail of one
CLIP = 0.5

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Images [B, 1, 8, 8] to logits [B, 3], with BatchNorm and dropout; fp32 logits under autocast."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.features(x)))
        return self.head(self.dropout(features).flatten(1)).float()


def net(device: torch.device, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(device)


def batches(sizes: tuple[int, ...] = SIZES) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(1)
    for size in sizes:
        yield torch.randn(size, 1, 8, 8, generator=draw), torch.randint(0, 3, (size,), generator=draw)


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def plain(device: torch.device, precision: str) -> tuple[dict[str, Tensor], int]:
    """The same training without the plug, and the values that the host read in it."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=precision == "fp16")
    before, data = mirror.reads(), list(batches())
    for window in (data[:3], data[3:6], data[6:]):
        total = sum(len(x) for x, _ in window)
        for x, y in window:
            dtype = DTYPES.get(precision)
            with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss * (len(x) / total)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    reads = mirror.reads() - before
    return on_cpu(model.state_dict()), reads


class Run:
    """One training with the plug; `reads` are those of each micro-batch, the tail's flush included."""

    def __init__(self, device: torch.device, precision: str = "fp32", dropout: float = 0.0, **options: Any) -> None:
        self.device, self.model = device, net(device, dropout=dropout)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accel = Accelerated(
            self.model, self.optimizer, host_clip_norm=CLIP,
            **{**OPTIONS, "accumulate": 3, "ema": 0.9, "precision": precision, **options},
        )  # fmt: skip
        if self.accel.session.update.scaler is not None:
            self.accel.session.update.scaler._init_scale = 1024.0
        self.reads: list[int] = []
        self.outcomes: list[Any] = []

    def feed(self, data: Iterator[Batch] | list[Batch]) -> Run:
        for x, y in data:
            before = mirror.reads()
            with self.accel.forward(x, y) as (images, labels):
                loss = nn.functional.cross_entropy(self.model(images), labels)
            outcome = self.accel.backward(loss, weight=torch.tensor(float(len(x)), device=self.device))
            self.reads.append(mirror.reads() - before)
            self.outcomes.append(outcome)
        return self

    def flushed(self) -> Run:
        before = mirror.reads()
        self.outcomes.append(self.accel.flush())
        self.reads.append(mirror.reads() - before)
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return on_cpu(self.model.state_dict())

    @property
    def momentum(self) -> Tensor:
        return self.optimizer.state_dict()["state"][0]["momentum_buffer"].cpu().clone()

    @property
    def average(self) -> dict[str, Tensor]:
        return on_cpu(self.accel.weights())


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two state dicts' values."""
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs)


def test_mirror_refuses_to_be_mixed_with_cpu_tensors_and_counts_reads() -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on one device, found mirror:0 and cpu"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    before = mirror.reads()
    float(torch.ones(2, device=DEVICE).sum())
    torch.ones(2, device=DEVICE).cpu()
    assert mirror.reads() - before == 2


def test_mirror_is_this_process_s_device() -> None:
    assert devices.accelerator() == "mirror"
    assert devices.own() == DEVICE
    assert devices.every() == [CPU, DEVICE]


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-6), ("bf16", 1e-3), ("fp16", 1e-3)])
def test_windows_clip_and_tail_equal_a_plain_loop_on_the_cpu(precision: str, limit: float) -> None:
    run = Run(DEVICE, precision).feed(batches()).flushed()
    assert off(run.weights, plain(CPU, precision)[0]) <= limit
    assert [o.stepped for o in run.outcomes if o] == [True, True, True]
    assert run.outcomes[-1].partial


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_and_average_are_those_of_the_cpu_bit_for_bit(precision: str) -> None:
    ours, theirs = (Run(device, precision).feed(batches()).flushed() for device in (DEVICE, CPU))
    assert same(ours.weights, theirs.weights)
    assert same(ours.average, theirs.average)
    assert [o.norm for o in ours.outcomes if o] == [o.norm for o in theirs.outcomes if o]


@pytest.mark.parametrize(("precision", "an_update"), [("fp32", 1), ("bf16", 1), ("fp16", 2)])
def test_no_read_a_micro_batch_and_one_an_update(precision: str, an_update: int) -> None:
    run = Run(DEVICE, precision).feed(batches()).flushed()
    assert run.reads == [0, 0, an_update, 0, 0, an_update, 0, an_update]
    host = plain(DEVICE, precision)[1]
    assert sum(run.reads) - host <= 3  # at most one an update more than the loop alone


def test_infinite_gradient_in_fp16_skips_the_update_and_halves_the_scale() -> None:
    run = Run(DEVICE, "fp16", accumulate=1)
    data = list(batches())
    run.feed(data[:2])
    weights, average, momentum = (
        run.weights,
        run.average,
        run.optimizer.state_dict()["state"][0]["momentum_buffer"].cpu(),
    )
    scale = run.accel.session.update.scaler.get_scale()
    run.feed([(torch.full_like(data[2][0], math.inf), data[2][1])])
    assert not run.outcomes[-1].stepped
    assert same(run.weights, weights)
    assert same(run.average, average)
    assert torch.equal(run.momentum, momentum)
    assert run.accel.session.update.scaler.get_scale() == scale / 2
    assert run.reads[-1] == 1  # the norm: the scaler has nothing to step
    run.feed(data[3:4])
    assert run.outcomes[-1].stepped
    assert not same(run.weights, weights)


def test_infinite_gradient_without_a_scaler_leaves_weights_and_average() -> None:
    run = Run(DEVICE, accumulate=1)
    data = list(batches())
    run.feed(data[:2])
    weights, average = run.weights, run.average
    run.feed([(torch.full_like(data[2][0], math.nan), data[2][1])])
    assert (run.outcomes[-1].stepped, run.reads[-1]) == (False, 1)
    assert same(run.weights, weights)
    assert same(run.average, average)


@pytest.mark.parametrize("after", [2, 3], ids=["inside a window", "between windows"])
@pytest.mark.parametrize("there", [DEVICE, CPU], ids=str)
def test_saved_run_resumes_over_the_cpu(after: int, there: torch.device, tmp_path: Path) -> None:
    data = list(batches())
    straight = Run(DEVICE).feed(data).flushed()
    half = Run(DEVICE).feed(data[:after])
    half.accel.save(tmp_path / "half.pt")
    state = torch.load(tmp_path / "half.pt", weights_only=True)  # without map_location: it holds CPU tensors
    assert {t.device for part in ("model", "gradients") for t in state[part].values()} == {CPU}
    rest = Run(there)
    rest.accel.resume(tmp_path / "half.pt")
    rest.feed(data[after:]).flushed()
    assert same(rest.weights, straight.weights)
    assert same(rest.average, straight.average)


def test_state_dict_moved_over_the_cpu_is_loaded_on_the_device() -> None:
    run = Run(DEVICE).feed(batches()).flushed()
    fresh = net(DEVICE)
    fresh.load_state_dict(run.weights)
    assert same(on_cpu(fresh.state_dict()), run.weights)
    assert {p.device for p in fresh.parameters()} == {DEVICE}


def test_trials_of_a_plan_put_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "HOPELESS", math.inf)  # no clock decides which plans are timed
    run = Run(DEVICE, "auto", planned=True, plan="auto", memory_format="auto", dropout=0.5)
    data = list(batches())
    run.feed(data[:6])  # steps to compare with; the optimizer and the average have a state
    x, y = data[6]

    def loss() -> Tensor:
        return nn.functional.cross_entropy(run.model(run.accel.moved(x)), y.to(DEVICE))

    def everything() -> Any:
        return [
            run.weights, run.average, torch.get_rng_state(), run.accel.session.window.state_dict(),
            [p.grad is None for p in run.model.parameters()], on_cpu(run.optimizer.state_dict()["state"][0]),
        ]  # fmt: skip

    before = everything()
    run.accel.plan(loss, 1_000_000, x.shape)
    timings = run.accel.session.tuner.timings
    assert {(t.plan.precision, t.plan.memory_format) for t in timings} >= {("host", "host"), ("bf16", "channels_last")}
    assert same(everything(), before)
    run.feed(data[6:]).flushed()
    assert all(o.stepped for o in run.outcomes if o)


def test_validation_has_the_averaged_weights_and_puts_the_live_ones_back() -> None:
    answers = []
    for device in (DEVICE, CPU):
        run = Run(device).feed(batches()).flushed()
        live = run.weights
        with run.accel.validation() as model:
            assert not model.training
            assert same(on_cpu(model.state_dict()), run.average)
            with run.accel.forward(next(batches())[0]) as images:
                answers.append(model(images).cpu())
        assert model.training
        assert same(run.weights, live)
    assert torch.equal(*answers)


def test_report_names_the_device(tmp_path: Path) -> None:
    run = Run(DEVICE, compile="on", compile_backend="inductor").feed(batches()).flushed()
    path = run.accel.end(tmp_path)
    assert path is not None
    report = run.accel.session.report
    assert (report.device, report.memory.kind) == ("mirror", "mirror")
    assert report.compile.decision == "eager"
    assert "inductor writes no code for mirror" in report.compile.reason
