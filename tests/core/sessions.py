"""What the tests of a session share."""

from __future__ import annotations

import torch
import torch._dynamo.callback as compile_callbacks
from torch import nn

ON = {"compile": "on", "compile_backend": "eager"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def listeners() -> int:
    handler = compile_callbacks.callback_handler
    return len(handler.start_callbacks) + len(handler.end_callbacks)
