from __future__ import annotations

import pytest
import torch

from plugins.core.step import precision

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bf16_only_where_it_has_instructions(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: fast, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    assert precision.resolve("auto", CPU) == ("bf16" if fast else "fp32")


def test_a_torch_without_the_questions_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert not precision.bf16_is_fast(CPU)


def test_an_unknown_device_stays_in_fp32() -> None:
    assert precision.resolve("auto", META) == "fp32"


@pytest.mark.parametrize("name", ["host", "fp32", "bf16"])
def test_others_pass_through(name: str) -> None:
    assert precision.resolve(name, CPU) == name


def test_fp16_on_a_cpu_is_refused_in_one_line_that_names_what_is_allowed() -> None:
    with pytest.raises(precision.Unsupported, match=r"precision=fp16.*host, auto, fp32, bf16") as caught:
        precision.resolve("fp16", CPU)
    assert "\n" not in str(caught.value)
    assert precision.resolve("fp16", torch.device("cuda")) == "fp16"
