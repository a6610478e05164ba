"""What a trial looks at beside its updates, each by a name in `TrialRequest.checks`: NAME, or NAME:ARGUMENT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from plugins.errors import AccelError
from plugins.trial_run.probes.base import Probe
from plugins.trial_run.probes.changes import NoDropout, Rate, Restored, Start
from plugins.trial_run.probes.gradients import Division, Reached, Samples, Sketch
from plugins.trial_run.probes.placement import HostReads, Placement
from plugins.trial_run.probes.savings import ActivationBudget, EightBit, Freeze

__all__ = ["PROBES", "Probe", "probes"]

PROBES: dict[str, type[Probe]] = {
    "gradient": Sketch,
    "reached": Reached,
    "division": Division,
    "samples": Samples,
    "placement": Placement,
    "host_reads": HostReads,
    "no_dropout": NoDropout,
    "start": Start,
    "rate": Rate,
    "restored": Restored,
    "freeze": Freeze,
    "eight_bit": EightBit,
    "activation_budget": ActivationBudget,
}


def probes(names: Iterable[str]) -> list[Callable[..., Probe]]:
    """The probes of these names, each to be given the session and the record.

    Raises:
        AccelError: a name that there is none of.
    """
    found: list[Callable[..., Probe]] = []
    for name in names:
        kind, _, argument = name.partition(":")
        if kind not in PROBES:
            raise AccelError(f"checks={name}: no such check; allowed are {', '.join(PROBES)}")
        found.append(partial(PROBES[kind], argument=argument))
    return found
