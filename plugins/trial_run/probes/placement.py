"""What a trial's model runs in: autocast, dtypes, BatchNorm, schedules, reads that make the host wait."""

from __future__ import annotations

import gc
import sysconfig
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from plugins.core.step.precision import bf16_is_fast
from plugins.core.step.update import Outcome
from plugins.core.system import devices
from plugins.core.system.memory import free_gib
from plugins.trial_run.probes.base import Probe

LOOKED_AT = 2  # the update, from 0, whose reads are counted: what is done once is over then
ROOT = Path(__file__).parents[3]


class Placement(Probe):
    """The autocast that the model's first layer with weights sees, the one that a step sees, and the layers' state."""

    @override
    def begin(self) -> None:
        self._seen: dict[str, Any] = {}
        model = self.session.model
        layer = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd, nn.LSTM))), None)
        self._hooks: list[Any] = [self.session.optimizer.register_step_pre_hook(self._before_step)]
        if layer is not None:
            self._hooks.append(layer.register_forward_pre_hook(self._before_layer))
        self._hooks.append(model.register_forward_hook(self._after_model))

    def _before_layer(self, layer: nn.Module, _: Any) -> None:
        kind = self.session.device.type
        if self.session.model.training and "autocast" not in self._seen:
            on = torch.is_autocast_enabled(kind)
            self._seen["autocast"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else ""

    def _after_model(self, model: nn.Module, _: Any, found: Any) -> None:
        if model.training and "output" not in self._seen:
            named = getattr(found, "logits", None)
            values = [named] if isinstance(named, Tensor) else pytree.tree_leaves(found)
            largest = max(
                (v for v in values if isinstance(v, Tensor) and v.dim() > 0), key=lambda v: v.numel(), default=None
            )
            if largest is not None:
                self._seen["output"] = largest.numel() // max(len(largest), 1)

    def _before_step(self, *_: Any) -> None:
        self._seen.setdefault("step_in_autocast", bool(devices.in_autocast()))
        if "batchnorm" not in self._seen:
            layers = [m for m in self.session.model.modules() if isinstance(m, _BatchNorm)]
            trained = [m for m in layers if any(p.requires_grad for p in m.parameters())]
            self._seen["batchnorm"] = [len(layers), sum(not m.training for m in trained)]

    @override
    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        scaler = self.session.scaler
        dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in self.session.parameters())
        model, every = self.session.model, gc.get_objects()
        schedules = [s for s in every if issubclass(type(s), LRScheduler) and s.optimizer is self.session.optimizer]
        wrapped = any(type(m).__name__ == "OptimizedModule" and m._modules.get("_orig_mod") is model for m in every)
        self.write(
            placement=self._seen,
            compiled_by_owner=wrapped or any(m._compiled_call_impl is not None for m in model.modules()),
            weights=dict(dtypes),
            scaler=bool(scaler is not None and scaler.is_enabled()),
            fast_bf16=bf16_is_fast(self.session.device),
            schedules=[s.last_epoch for s in schedules],
            bytes=self._bytes(),
            free_gib=free_gib(self.session.device),
        )

    def _bytes(self) -> dict[str, int]:
        """Of weights and buffers, and of the optimizer's state."""
        model = [*self.session.model.parameters(), *self.session.model.buffers()]
        state = [t for s in self.session.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return {name: sum(t.numel() * t.element_size() for t in many) for name, many in
                (("model", model), ("optimizer", state))}  # fmt: skip


class HostReads(Probe):
    """Values that one update reads back from its device, each with the line that asks for it; not the plug's own."""

    @override
    def arrived(self, first: bool) -> None:
        if first and self.session.updates == LOOKED_AT:
            self._mode = _Reads(self.session.device)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    @override
    def closed(self, outcome: Outcome) -> dict[str, Any]:
        if (mode := getattr(self, "_mode", None)) is not None:
            del self._mode
            mode.__exit__(None, None, None)
            self.write(host_reads=mode.lines, of_micro_batches=outcome.micro_batches)
        return {}


class _Reads(TorchDispatchMode):
    WAITING = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten._unique2.default")

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.lines = device, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) in self.WAITING and isinstance(args[0], Tensor) and args[0].device.type == self.device.type:
            where = line_at_hand()
            if where:
                self.lines[where] += 1
        if function is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]  # a mode is handed the number that autograd saved in place of its tensor, and cannot call on
        return function(*args, **(kwargs or {}))


def line_at_hand() -> str:
    """FILE:LINE of the innermost frame that is neither torch's nor Python's; empty where it is the plug's own."""
    library = Path(sysconfig.get_paths()["stdlib"])
    torch_root = Path(torch.__file__).parent
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        ours = path.is_relative_to(ROOT / "plugins") or path.is_relative_to(ROOT / "integrations")
        if ours and path != Path(__file__):
            return ""
        stdlib = path.is_relative_to(library) and "site-packages" not in path.parts
        if not ours and not path.is_relative_to(torch_root) and not stdlib and path.is_file():
            return f"{path.name}:{frame.lineno}"
    return ""
