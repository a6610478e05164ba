"""Devices as torch's modules answer for them; MPS and XPU through stand-ins that have what torch's own modules have."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugins.core.compile.toolchain import missing_compiler
from plugins.core.step import precision
from plugins.core.system import devices, memory

ROOT = Path(__file__).parents[3]
CPU, META, MPS, XPU = (torch.device(kind) for kind in ("cpu", "meta", "mps", "xpu"))
GIB = 1 << 30


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.xpu of a machine with two cards, the second current; kept are the calls that change something."""
    calls: list[Any] = []
    module = SimpleNamespace(
        calls=calls,
        device_count=lambda: 2,
        current_device=lambda: 1,
        set_device=lambda index: calls.append(("set_device", index)),
        get_device_name=lambda device: f"Intel {device}",
        memory_allocated=lambda device: 2 * GIB,
        memory_reserved=lambda device: 3 * GIB,
        max_memory_allocated=lambda device: 4 * GIB,
        mem_get_info=lambda device: (5 * GIB, 16 * GIB),
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        synchronize=lambda device: calls.append(("synchronize", device)),
        empty_cache=lambda: calls.append("empty_cache"),
        is_bf16_supported=lambda including_emulation: not including_emulation,
        get_device_properties=lambda device: SimpleNamespace(has_fp64=False),
        get_rng_state=lambda device: torch.tensor([device.index]),
        set_rng_state=lambda state, device: calls.append((device.index, state.tolist())),
    )
    monkeypatch.setattr(devices, "_module", lambda device: module)
    monkeypatch.setattr(devices, "accelerator", lambda: "xpu")
    return module


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mps: no peak, no name, one generator."""
    answers = {"current_allocated_memory": 2, "driver_allocated_memory": 3, "recommended_max_memory": 10}
    for name, gib in answers.items():
        monkeypatch.setattr(torch.mps, name, lambda gib=gib: gib * GIB)
    monkeypatch.setattr(devices, "accelerator", lambda: "mps")


def test_no_other_file_asks_a_device_module() -> None:
    named = re.compile(r"\btorch\.(cuda|xpu|mps|accelerator|backends\.mps)\b")
    rooms = [p for room in ("plugins", "integrations", "examples", "benchmarks") for p in (ROOT / room).rglob("*.py")]
    found = {str(p.relative_to(ROOT)) for p in rooms if named.search(p.read_text(encoding="utf-8"))}
    assert found == {"plugins/core/system/devices.py"}


def test_cpu_counts_no_memory_and_waits_for_nothing() -> None:
    for ask in (devices.allocated, devices.reserved, devices.peak, devices.free, devices.total):
        assert ask(CPU) is None
    devices.synchronize(CPU)
    devices.empty_cache(CPU)
    devices.reset_peak(CPU)
    assert devices.name(CPU) == "cpu"
    assert devices.has_float64(CPU)
    assert devices.has_autocast(CPU)
    assert not any(can(CPU) for can in (devices.scales_gradients, devices.has_cuda_graphs, devices.pins))


def test_device_without_module_has_none_of_it() -> None:
    assert devices.peak(META) is None
    assert not devices.has_fast_bf16(META)
    assert devices.name(META) == "meta"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_machine_without_accelerator_trains_on_the_cpu() -> None:
    assert (devices.accelerator(), devices.own(), devices.every(), devices.backend()) == ("", CPU, [CPU], "gloo")
    devices.use(0)
    assert devices.random_states() == []


def test_xpu_is_asked_through_its_module(xpu: SimpleNamespace) -> None:
    card = torch.device("xpu", 1)
    assert devices.own() == card
    assert devices.every() == [CPU, torch.device("xpu", 0), card]
    assert devices.name(card) == "Intel xpu:1"
    assert [ask(card) for ask in (devices.allocated, devices.reserved, devices.peak, devices.free)] == [
        2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB,
    ]  # fmt: skip
    assert memory.Peaks(card).kind == "xpu"
    assert memory.limit_gib(card) == 16
    devices.use(1)
    devices.synchronize(card)
    devices.empty_cache(card)
    assert xpu.calls == [("reset", card), ("set_device", 1), ("synchronize", card), "empty_cache"]
    assert devices.backend() == torch.distributed.Backend.default_device_backend_map["xpu"]


def test_xpu_s_bf16_is_its_own_and_not_an_emulation(xpu: SimpleNamespace) -> None:
    assert precision.resolve("auto", XPU) == "bf16"
    assert not devices.has_cuda_graphs(XPU)
    assert devices.pins(XPU)


def test_xpu_without_double_precision_keeps_counts_in_single(xpu: SimpleNamespace) -> None:
    devices._xpu_has_float64.cache_clear()
    assert not devices.has_float64(XPU)
    devices._xpu_has_float64.cache_clear()


def test_generators_of_all_accelerators_are_kept_and_put_back(xpu: SimpleNamespace) -> None:
    states = devices.random_states()
    assert [s.tolist() for s in states] == [[0], [1]]
    devices.set_random_states(states)
    assert xpu.calls == [(0, [0]), (1, [1])]
    devices.set_random_states(states[:1])  # of a machine with another number of cards
    assert len(xpu.calls) == 2


def test_mps_counts_memory_but_no_peak(mps: None) -> None:
    assert [ask(MPS) for ask in (devices.allocated, devices.reserved, devices.free)] == [2 * GIB, 3 * GIB, 7 * GIB]
    assert devices.peak(MPS) is None
    assert memory.Peaks(MPS).kind == "rss"
    assert memory.in_use_gib(MPS) == 2.0


def test_mps_has_neither_double_precision_nor_cuda_graphs(mps: None) -> None:
    assert not devices.has_float64(MPS)
    assert not devices.has_cuda_graphs(MPS)
    assert not devices.pins(MPS)
    assert devices.name(MPS) == "mps"
    assert precision.resolve("auto", MPS) == "fp32"


def test_mps_without_the_scaler_s_operator_refuses_fp16(mps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_has_scaler", lambda kind: False)
    with pytest.raises(precision.Unsupported, match=r"^precision=fp16: not on mps here; allowed here are host, auto"):
        precision.resolve("fp16", MPS)
    monkeypatch.setattr(devices, "_has_scaler", lambda kind: True)
    assert precision.resolve("fp16", MPS) == "fp16"


def test_device_that_inductor_does_not_know_is_one_line() -> None:
    assert missing_compiler(META, "inductor") == "inductor writes no code for meta"
    assert missing_compiler(META, "eager") == ""
