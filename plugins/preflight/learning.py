"""Does it learn: the loss, the learning rate, its warm-up and schedule."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean, median, pstdev

from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict, finding, skipped

FEW = 10  # updates, below which a loss says little
RISE = 1.1  # of the loss, above which it does not only waver
ABSURD = 1000.0  # times the loss before any update
TOO_HIGH = 1.5  # times the loss before any update, and at a tenth of the rate


def losses(updates: list[dict[str, float | None]]) -> list[float]:
    """One an update; NaN where it was not finite."""
    return [math.nan if u["loss"] is None else float(u["loss"]) for u in updates]


def loss_falls(trials: Trials) -> Finding:
    """The mean of the last quarter of the losses against that of the first."""
    found, check = losses(trials.first.updates), "loss falls"
    bad = sum(not math.isfinite(value) for value in found)
    if bad:
        return finding(
            check, Verdict.FAIL, f"{bad} of {len(found)} losses are not finite", "lower the learning rate; look for 0/0"
        )
    if len(found) < 4:
        return skipped(check, f"{len(found)} updates")
    begin, end, noise = ends(found)
    figure = f"{begin:.4g} -> {end:.4g} in {len(found)} updates"
    if len(found) < FEW:
        return finding(check, Verdict.PASS if end < begin else Verdict.WARN, figure, "too few updates to tell")
    if end > begin * RISE and end - begin > noise:
        return finding(check, Verdict.FAIL, figure, "lower the learning rate, and look at labels and loss")
    if end < begin:
        return finding(check, Verdict.PASS, figure)
    return finding(
        check, Verdict.WARN, figure, "it does not fall yet: warm-up, a rate too small, or labels that say nothing"
    )


def ends(found: list[float]) -> tuple[float, float, float]:
    """Means of the first and the last quarter, and the first's spread."""
    quarter = max(len(found) // 4, 1)
    begin = found[:quarter]
    return mean(begin), mean(found[-quarter:]), pstdev(begin)


def learning_rate(trials: Trials) -> Finding:
    """Whether the updates blow the loss up; and the effective batch that the rate was chosen for."""
    first, check = trials.first, "learning rate against the effective batch"
    found, rates = losses(first.updates), [max(u["rates"]) for u in first.updates]
    if not rates:
        return skipped(check, "no update")
    window = trials.window
    figure = f"rate up to {max(rates):.3g} at {window['effective_batch']} samples an update"
    skips = sum(not u["stepped"] for u in first.updates)
    finite = [value for value in found if math.isfinite(value)]
    if skips or len(finite) < len(found):
        return finding(check, Verdict.FAIL, f"{figure}; {skips} updates skipped, gradients not finite", lower(trials))
    if runs_away(trials, found):
        begin, worst = found[0], max(found)
        return finding(
            check, Verdict.FAIL, f"{figure}; the loss went from {begin:.3g} up to {worst:.3g}", lower(trials)
        )
    config = first.report["config"]
    if window["accumulate"] > 1 and config["lr_scale"] == "off" and config["accumulate"] != "host":
        return finding(
            check,
            Verdict.WARN,
            f"{figure}, {window['accumulate']} times the loop's own",
            "lr_scale=sqrt (adaptive optimizers) or linear (SGD), where the rate is that of the smaller batch",
        )
    return finding(check, Verdict.PASS, figure)


def runs_away(trials: Trials, found: list[float]) -> bool:
    """Whether the loss rises from the first update on, and would not at a tenth of the rate."""
    if max(found) > ABSURD * abs(found[0]):
        return True
    short = found[1 : trials.short]
    if not short or median(short) < TOO_HIGH * found[0]:
        return False
    slower = losses(trials.slower.updates)[1:]
    return not slower or median(short) > TOO_HIGH * median(slower)


def lower(trials: Trials) -> str:
    """What to do about a rate that is too high."""
    return "lower it, ten times at first" + ("" if trials.job.rates else "; --lr-scan measures it")


def scan(trials: Trials) -> Finding:
    """The rate at which the loss has come down most."""
    check, scanned = "learning rate scan", trials.scanned
    if not scanned:
        return skipped(check, "--lr-scan was not given")
    falls = fallen(trials)
    if not falls:
        return finding(check, Verdict.FAIL, "the loss is not finite at any rate", "look at the loss itself")
    best = min(falls, key=lambda factor: falls[factor])
    base = max((max(u["rates"]) for u in trials.first.updates), default=0.0)
    told = "; ".join(f"x{factor:g}: {falls.get(factor, math.nan):.4g}" for factor in sorted(scanned))
    own = falls.get(1.0, math.inf)
    keep = best == 1.0 or own <= falls[best] * 1.02
    return finding(
        check,
        Verdict.PASS if keep else Verdict.WARN,
        f"loss after {min(20, trials.job.updates)} updates: {told}",
        f"a rate of {base * best:.3g} (x{best:g})",
    )


def fallen(trials: Trials) -> dict[float, float]:
    """The last quarter's mean loss at each factor; those that ran away are left out."""
    found = {factor: losses(result.updates) for factor, result in trials.scanned.items()}
    return {f: ends(v)[1] for f, v in found.items() if v and all(math.isfinite(x) for x in v)}


def rises(rates: list[float]) -> int:
    """Updates over which a rate rises without a stop, from the first on."""
    return next((at for at, (a, b) in enumerate(pairwise(rates)) if b <= a), len(rates) - 1)


def warm_up(trials: Trials) -> Finding:
    """How many updates the rate rises, and that a schedule moves once an update and not once a micro-batch."""
    first, check = trials.first, "warm-up counted in updates"
    rates = [max(u["rates"]) for u in first.updates]
    if not rates:
        return skipped(check, "no update")
    steps, made = first.fact("schedules") or [], len(rates)
    micro_batches = sum(u["micro_batches"] for u in first.updates)
    if trials.accumulate > 1 and any(step >= micro_batches - 1 > made for step in steps):
        return finding(
            check,
            Verdict.FAIL,
            f"a schedule took {max(steps)} steps in {made} updates",
            f"step it once an update (schedule= of the plug does): it runs {trials.accumulate} times too fast",
        )
    groups: list[list[float]] = [list(group) for group in zip(*(u["rates"] for u in first.updates), strict=True)]
    rates = max(groups, key=rises)  # a host may let one group's fall meanwhile
    rising = rises(rates)
    if not rising:
        return finding(check, Verdict.PASS, f"no warm-up; the rate begins at {rates[0]:.3g}")
    longer = f"over {made}" if rising == made - 1 else str(rising)
    return finding(check, Verdict.PASS, f"the rate rises for {longer} updates, {rates[0]:.3g} -> {max(rates):.3g}")
