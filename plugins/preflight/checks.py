"""All checks, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable

from plugins.preflight import compiling, gradients, learning, precision, repeating, resources, speed
from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict, finding
from plugins.trial_run.launch import Ended


def runs(trials: Trials) -> Finding:
    """Whether the job came to the updates that it was given, and how long they took."""
    first, check = trials.first, "the job trains"
    many, wanted = len(first.updates), trials.job.updates
    seconds = sum(u["seconds"] + u["wait"] for u in first.updates)
    figure = f"{many} updates of {trials.window['effective_batch']} samples in {seconds:.0f} s"
    if first.ended is Ended.COMPLETE:
        if many < wanted:
            return finding(check, Verdict.WARN, f"{figure}: the job ends there", "verdicts are on these updates only")
        return finding(check, Verdict.PASS, figure)
    return finding(check, Verdict.FAIL, f"{first.ended.value} after {many} updates", first.last_line[:200])


CHECKS: tuple[Callable[[Trials], Finding], ...] = (
    runs,
    learning.loss_falls,
    gradients.reach,
    gradients.exact,
    compiling.equals_eager,
    compiling.graph_breaks,
    compiling.budget,
    precision.placed,
    precision.scaler,
    precision.batchnorm,
    learning.learning_rate,
    learning.scan,
    learning.warm_up,
    speed.loader,
    speed.host_reads,
    repeating.seeds,
    repeating.resume,
    resources.memory,
    resources.evaluation,
    resources.disk,
    resources.versions,
)
