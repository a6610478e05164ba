"""What a trial changes of a run, so that it can be compared with another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from plugins.core import checkpoint
from plugins.core.step.update import Outcome
from plugins.trial_run.probes.base import Probe
from plugins.trial_run.request import current


class NoDropout(Probe):
    """Dropout off, so that an update is a function of its samples alone."""

    @override
    def begin(self) -> None:
        for module in self.session.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(module, nn.RNNBase):
                module.dropout = 0.0


class Start(Probe):
    """The weights of a file, which the first trial that names it writes: all of them then begin alike."""

    @override
    def begin(self) -> None:
        path, model = Path(self.argument), self.session.model
        if path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    if name in state and state[name].shape == tensor.shape:
                        tensor.copy_(state[name])
        else:
            torch.save({n: t.cpu() for n, t in model.state_dict().items()}, path)


class Rate(Probe):
    """Every step at the learning rate times the argument; schedules see their own rate."""

    @override
    def begin(self) -> None:
        self._factor = float(self.argument)
        optimizer = self.session.optimizer
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._scale(self._factor)),
            optimizer.register_step_post_hook(lambda *_: self._scale(1 / self._factor)),
        )

    def _scale(self, factor: float) -> None:
        for group in self.session.optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    @override
    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Restored(Probe):
    """After so many updates, the run is saved, its weights and optimizer are thrown away, and it is loaded again.

    What no state dict holds has the value it began with, as in a process that builds the model anew.
    """

    @override
    def begin(self) -> None:
        self._built: dict[str, torch.Tensor] = {}

    @override
    def arrived(self, first: bool) -> None:
        if first and not self.session.updates:
            model = self.session.model
            saved = model.state_dict()
            self._built = {name: b.clone() for name, b in model.named_buffers() if name not in saved}

    @override
    def closed(self, outcome: Outcome) -> dict[str, Any]:
        session = self.session
        if session.updates != int(self.argument):
            return {}
        request = current()
        assert request is not None  # a probe is of a trial
        path = request.folder / "restored.pt"
        torch.save(session.state_dict(), path)
        with torch.no_grad():
            for tensor in session.parameters():
                tensor.zero_()
            for name, buffer in session.model.named_buffers():
                built = self._built.get(name)  # one that has grown since is filled anew by whoever let it
                buffer.zero_() if built is None or built.shape != buffer.shape else buffer.copy_(built)
        for state in session.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        saved = torch.load(path, map_location="cpu", weights_only=True)
        session.load_state_dict(saved)
        checkpoint.set_random_state(saved["random"])
        self.write(restored_at=session.updates, restored_bytes=path.stat().st_size)
        return {}
