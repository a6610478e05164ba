"""A session's state: everything that a bit-for-bit resume needs, as values that `weights_only` loading allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plugins.core.checkpoint import load_own_state, own_name, own_state, random_state
from plugins.core.plan import Plan
from plugins.core.planfile import Switch
from plugins.core.update import Resumable

if TYPE_CHECKING:
    from plugins.core.session import Session


def state_of(session: Session) -> dict[str, Any]:
    """Live weights, optimizer, scaler, average, the window with its gradients, counts, plan, random state."""
    update, window = session.update, session.window
    named = session.model.named_parameters()
    gradients = {own_name(n): p.grad.detach() for n, p in named if p.grad is not None}
    return {
        "config": session.config.given(),
        "model": {n: t.detach() if isinstance(t, Tensor) else t for n, t in own_state(session.model).items()},
        "beside_model": [p.detach() for p in update.beside(session.model)],
        "beside_gradients": [] if window.empty else [p.grad for p in update.beside(session.model)],
        "optimizer": update.optimizer.state_dict(),
        "scaler": update.scaler.state_dict() if update.scaler is not None else {},
        "average": update.average.state_dict() if isinstance(update.average, Resumable) else {},
        "window": window.state_dict(),
        "gradients": {} if window.empty else gradients,
        "kept_statistics": [] if window.empty else list(session.statistics._kept),
        "counts": session.counts(),
        "plan": session.planner.plan.as_dict(),
        "switches": [switch.as_dict() for switch in session.planner.switches],
        "measured": session.planner.state == "done",
        "random": random_state(),
    }


def put_back(session: Session, state: Mapping[str, Any]) -> None:
    """The opposite of `state_of`, the random state excepted: that is for the last moment before the first batch."""
    update = session.update
    load_own_state(session.model, state["model"])
    for parameter, value in zip(update.beside(session.model), state.get("beside_model", []), strict=False):
        parameter.detach().copy_(value)
    update.optimizer.load_state_dict(state["optimizer"])
    if update.scaler is not None and state["scaler"]:
        update.scaler.load_state_dict(state["scaler"])
    if state["average"] and isinstance(update.average, Resumable):
        update.average.load_state_dict(state["average"])
    session.window.load_state_dict(state["window"])
    parameters = {own_name(name): parameter for name, parameter in session.model.named_parameters()}
    for name, gradient in state["gradients"].items():
        parameters[name].grad = gradient.to(parameters[name].device)
    for parameter, gradient in zip(update.beside(session.model), state.get("beside_gradients", []), strict=False):
        parameter.grad = gradient.to(parameter.device) if gradient is not None else None
    session.statistics._kept = [t.to(session.device) for t in state["kept_statistics"]]
    session.set_counts(state["counts"])
    plan = Plan.from_dict(state.get("plan", {}))
    switches = [Switch.from_dict(switch) for switch in state.get("switches", [])]
    session.planner.resume(plan, session.updates, state.get("measured", True), switches)
