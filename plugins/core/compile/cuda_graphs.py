"""Whether code may run as CUDA graphs here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plugins.config import AccelConfig
from plugins.core.system import devices


def has_cuda_graphs(device: torch.device, backend: str) -> bool:
    """Whether the device has them and this backend uses them."""
    return devices.has_cuda_graphs(device) and backend == "inductor"


def may_use_cuda_graphs(device: torch.device, config: AccelConfig, dims: Sequence[int]) -> bool:
    """Whether a plan may have CUDA graphs: the user chose no mode, and shapes stay as they are.

    Args:
        device: of the model.
        config: the settings of the run.
        dims: dimensions of the input that vary.
    """
    static = not dims or config.dynamic == "static"
    return config.compile_mode == "default" and static and has_cuda_graphs(device, config.compile_backend)
