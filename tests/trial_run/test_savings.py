"""What a trial does in the user's place to save memory."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from plugins.errors import AccelError
from plugins.trial_run.probes.savings import LIBRARIES, eight_bit, freeze_half


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2))


def test_half_of_the_parameters_are_frozen_from_the_input_on() -> None:
    model = net()
    freeze_half(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["0.weight", "0.bias", "1.weight"]  # 40 of 86 are not half of them yet


def test_the_last_parameter_trains_also_where_it_is_nearly_all() -> None:
    model = nn.Linear(1, 1000)
    freeze_half(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]


class AdamW8bit(torch.optim.AdamW):
    """Stands in for a library's: the same steps, so that they can be compared."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first library is there, and has one optimizer; the second is not installed."""
    made = ModuleType(LIBRARIES[0])
    made.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, LIBRARIES[0].partition(".")[0], ModuleType("parent"))
    monkeypatch.setitem(sys.modules, LIBRARIES[0], made)
    monkeypatch.setitem(sys.modules, LIBRARIES[1], None)


@pytest.mark.usefixtures("library")
def test_an_optimizer_of_the_same_kind_does_the_steps_with_the_same_groups_and_rates() -> None:
    ends = []
    for small in (False, True):
        model = net()
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters(), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.9))
        if small:
            eight_bit(optimizer)
        for rate in (1.0, 0.5):
            for group in optimizer.param_groups:
                group["lr"] *= rate
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (len(optimizer.state) == 0) is small
        ends.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.usefixtures("library")
def test_a_kind_that_no_library_has_is_said() -> None:
    with pytest.raises(AccelError, match="no Adadelta8bit in bitsandbytes or torchao"):
        eight_bit(torch.optim.Adadelta(net().parameters()))
