"""The contract between a host's adapter and the core: everything of a session that an adapter may use.

The host drives; an adapter translates the host's own events into these calls. It gets `HostTools` from the plug, and
with them, once the host has built everything, a `Session`, complete from then on:

    start = tools.start(device)            precision and memory format to begin with
    session = tools.new_session(model, optimizer, ...)
    for every micro-batch:                 micro_batch, shape, mean | batch_mean (the loss's weight)
    at a window's first, before forward:   plan_window
    where the session steps:               backward_done after each backward, or close at the host's own moment
    where the host steps by itself:        prepare_update before its step, finish_update after it
    where its engine has stepped already:  engine_stepped, then finish_update
    around validation:                     validation()
    around a checkpoint:                   run_state() | state_dict() and load_state_dict(), files
    at the end, on errors too:             end

The order inside an update stands in `plugins/core/step/update.py`. `plugins.core.session.Session` is the one
implementation; `tests/test_contract.py` runs every host against a session that has nothing but what is declared here.
"""

from integrations.contract.parts import (
    Average,
    Config,
    Files,
    Outcome,
    RunState,
    Start,
    Trial,
    WeightAverage,
    Window,
)
from integrations.contract.report import CompileFacts, EmaFacts, LossFacts, Report, ShapeFacts, WindowFacts
from integrations.contract.rescue import Rescue
from integrations.contract.session import Session
from integrations.contract.tools import HostTools, NewSession
from integrations.refusal import UnsupportedRun

__all__ = [
    "Average", "CompileFacts", "Config", "EmaFacts", "Files", "HostTools", "LossFacts", "NewSession", "Outcome",
    "Report", "Rescue", "RunState", "Session", "ShapeFacts", "Start", "Trial", "UnsupportedRun", "WeightAverage",
    "Window", "WindowFacts",
]  # fmt: skip
