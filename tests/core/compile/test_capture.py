"""What a compile worker is given."""

from __future__ import annotations

import pickle

import cloudpickle
import torch
from torch import Tensor, nn

from plugins.core.compile.capture import Call, Captured, Like, kinds, made
from tests.core.planned import Blocks
from tests.core.tiny import mlp


def test_kinds_keep_everything_but_values() -> None:
    x = torch.rand(3, 4).t().requires_grad_()
    (kind, *_), _ = given = kinds(([x, 2, None], {"mask": torch.ones(2, dtype=torch.bool)}))
    assert kind == Like((4, 3), (1, 4), torch.float32, "cpu", True)
    (again, two, nothing), named = made(pickle.loads(pickle.dumps(given)))
    assert (again.shape, again.stride(), again.requires_grad, two, nothing) == (x.shape, x.stride(), True, 2, None)
    assert named["mask"].dtype is torch.bool
    assert not again.any()


def test_captured_is_one_call_a_kind_and_leaves_no_trace() -> None:
    model = Blocks(4)
    with Captured(list(model.blocks)) as captured:
        for _ in range(2):
            model(torch.rand(4, 6))
    assert [call.args[0].requires_grad for call in captured.calls] == [False, True]  # the first block's input, and on
    assert all(m._compiled_call_impl is None for m in model.modules())
    assert all(call.autocast is None for call in captured.calls)


def test_captured_notes_autocast_and_only_what_would_be_compiled() -> None:
    model = mlp()
    with (
        Captured([model], takes=lambda args: len(args[0]) == 4) as captured,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(torch.rand(4, 3))
        model(torch.rand(5, 3))
    assert [(call.args[0].shape, call.autocast) for call in captured.calls] == [((4, 3), ("cpu", torch.bfloat16))]


def test_a_worker_of_a_model_of_the_script_itself() -> None:
    """Classes that another process cannot import travel by value."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    job = pickle.loads(cloudpickle.dumps([Call(Own(), (1,), {}, None)]))
    assert job[0].module(3) == 6
