"""BatchNorm under accumulation: its running statistics move once a micro-batch, not once an update.

`momentum` keeps the time constant an update: 1 - (1 - m)^(1/K), so that K moves decay the old statistics as one
did. `freeze` holds the statistics (the layer normalises with them). `precise` re-estimates them over given
batches. A micro-batch of fewer than 8 samples gives noisy statistics whatever the rule; that is worth a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SMALL_MICRO_BATCH = 8
# The momentum of layers where a rule has set one, and what it has set; also after a run without an end.
_OWN: WeakKeyDictionary[_BatchNorm, tuple[float, float]] = WeakKeyDictionary()


def layers(model: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers that keep running statistics and are not held by the host."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def momentum_per_micro_batch(momentum: float, accumulate: int) -> float:
    """The momentum whose K-th power of decay equals one update's: 0.03 at K = 4 gives 0.0076."""
    return float(1.0 - (1.0 - momentum) ** (1.0 / accumulate))


def own_momentum(layer: _BatchNorm) -> float | None:
    """The momentum that the layer has without a rule; the user's, where he has set another since."""
    own, scaled = _OWN.get(layer, (layer.momentum, layer.momentum))
    return own if layer.momentum == scaled else layer.momentum


class Statistics:
    """The rule in force on one model, and the way back from a window that must leave no trace."""

    def __init__(self, model: nn.Module, rule: str = "host") -> None:
        self.model, self.rule = model, rule
        self.layers = layers(model)
        self._kept: list[Tensor] = []

    def apply(self, accumulate: int) -> None:
        """Set the rule for windows of `accumulate` micro-batches; call again whenever training mode is set."""
        if self.rule == "momentum":
            for layer in self.layers:
                if (own := own_momentum(layer)) is not None:
                    layer.momentum = momentum_per_micro_batch(own, accumulate)
                    _OWN[layer] = own, layer.momentum
        elif self.rule == "freeze":
            for layer in self.layers:
                layer.eval()

    def undo(self) -> None:
        """Give the layers their own momentum back."""
        for layer in self.layers:
            layer.momentum = own_momentum(layer)
            _OWN.pop(layer, None)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the statistics as a window begins (a few thousand numbers, on their device)."""
        if not self._kept:
            self._kept = [b.detach().clone() for b in self._buffers()]
        else:
            torch._foreach_copy_(self._kept, self._buffers())

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what `keep` remembered: a NaN in one batch would otherwise stay in the running mean for good."""
        if self._kept:
            torch._foreach_copy_(self._buffers(), self._kept)

    def state_dict(self) -> dict[str, Any]:
        """The statistics as the window began."""
        return {"kept_statistics": list(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        kept = state.get("kept_statistics", [])
        self._kept = [t.to(b.device) for t, b in zip(kept, self._buffers(), strict=True)] if kept else []

    def _buffers(self) -> list[Tensor]:
        """As they are now: a host that casts a model puts others in their place."""
        return [b for layer in self.layers for b in layer.buffers()]


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any]) -> int:
    """Set running statistics to the plain average over `batches`, as `precise` asks; returns the batches used.

    `forward(batch)` runs the model in training mode. Cumulative averaging is BatchNorm's own `momentum=None`.
    """
    found = layers(model)
    modes = {m: m.training for m in model.modules()}
    momentum = [layer.momentum for layer in found]
    used = 0
    try:
        model.eval()
        for layer in found:
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
        for batch in batches:
            forward(batch)
            used += 1
    finally:
        for layer, value in zip(found, momentum, strict=True):
            layer.momentum = value
        for module, training in modes.items():
            module.training = training
    return used
