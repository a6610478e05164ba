from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from integrations.precision_layout import LoopLayout
from plugins.core.step.ema import EMA
from tests.core.tiny import CPU, same, snapshot


class Grid(nn.Module):
    """4-dim and other parameters, and a 4-dim buffer. [B, 3, H, W] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.deep = nn.Conv3d(2, 2, 1)
        self.register_buffer("grid", torch.rand(1, 3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(x)
        return found


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in model.state_dict().values()]


def test_layouts_change_in_place_and_back() -> None:
    model = Grid()
    average, optimizer = EMA(model, 0.5), torch.optim.SGD(model.parameters(), 0.1)
    values, before, layout = snapshot(model), strides(model), LoopLayout(model, CPU)
    layout.apply("host", "channels_last")
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert strides(model) != before
    assert same(snapshot(model), values)
    model(torch.rand(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    model.grid.add_(1.0)
    average.update()
    with average.swapped():  # it holds the tensors that the model has now
        assert not torch.equal(model.conv.weight, values["conv.weight"])
        assert not torch.equal(model.grid, values["grid"])
    layout.apply("host", "host")
    assert strides(model) == before


def test_a_model_that_its_owner_laid_out_stays_so() -> None:
    model = nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before, layout = strides(model), LoopLayout(model, CPU)
    for memory_format in ("channels_last", "host"):
        layout.apply("host", memory_format)
        assert strides(model) == before


def test_precision_is_an_autocast_and_images_follow_the_layout() -> None:
    layout, images = LoopLayout(nn.Conv2d(3, 2, 1), CPU), torch.rand(2, 3, 4, 4)
    for precision, dtype in (("host", None), ("fp32", None), ("bf16", torch.bfloat16)):
        layout.apply(precision, "host")
        assert layout.dtype is dtype
        assert layout.at(lambda: layout.model(images)).loss().dtype is (dtype or torch.float32)
    assert layout.moved(images) is images
    layout.apply("host", "channels_last")
    assert layout.moved(images).is_contiguous(memory_format=torch.channels_last)
    assert layout.moved(images[0]).stride() == images[0].stride()


@pytest.mark.parametrize("channels", [1, 3])
def test_what_follows_the_first_convolution_is_laid_out_too(channels: int) -> None:
    model = nn.Conv2d(channels, 4, 3)
    before, layout = strides(model), LoopLayout(model, CPU)
    layout.apply("host", "channels_last")
    features = model(layout.moved(torch.rand(2, channels, 6, 5)))
    assert features.is_contiguous(memory_format=torch.channels_last)
    layout.apply("host", "host")
    assert strides(model) == before
    assert model(torch.rand(2, channels, 6, 5)).is_contiguous()


@pytest.mark.parametrize("bf16", [True, False])
def test_the_precision_of_the_hosts_own_autocast(bf16: bool) -> None:
    """Where the plan leaves precision to the host, this is what runs."""
    from integrations.huggingface import precision_layout as hf
    from integrations.patches import Patches
    from integrations.ultralytics import precision_layout as ultralytics

    args = SimpleNamespace(device=CPU, bf16=bf16, fp16=False, amp="bf16")
    trainer = SimpleNamespace(args=args, device=CPU, amp=bf16)
    model = nn.Identity()
    model.loss = lambda batch: batch  # type: ignore[assignment]
    wanted = "bf16" if bf16 else "fp32"
    assert hf.Layout(trainer, nn.Identity(), None).host_precision == wanted
    assert ultralytics.Layout(trainer, model, Patches()).host_precision == wanted
    assert LoopLayout(model, CPU).host_precision == "fp32"
    args.amp, args.bf16, args.fp16 = True, False, bf16
    wanted = "fp16" if bf16 else "fp32"
    assert hf.Layout(trainer, nn.Identity(), None).host_precision == wanted
    assert ultralytics.Layout(trainer, model, Patches()).host_precision == wanted
