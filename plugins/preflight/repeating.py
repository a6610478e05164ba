"""Does a second run come to the same, and does a run that was saved and loaded go on as it would have."""

from __future__ import annotations

import math

from plugins.preflight.trials import RESTORED_AT, Trials, difference, why_not
from plugins.preflight.verdict import Finding, Verdict, finding, skipped

SAME = 1e-5  # relative: threads may add in another order
NEAR = 0.1  # what another seed does not come to


def _apart(trials: Trials, begin: int, end: int | None = None) -> list[float]:
    """Of the updates in this range, in both runs: how far their losses and gradients are from one another."""
    found = []
    for one, other in list(zip(trials.again.updates, trials.first.updates, strict=False))[begin:end]:
        a, b = one["loss"], other["loss"]
        worst = difference(one, other) or 0.0
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
            worst = max(worst, abs(a - b) / max(abs(b), 1e-12))
        found.append(worst)
    return found


def seeds(trials: Trials) -> Finding:
    """The same updates, in another process."""
    check = "two short runs with one seed agree"
    if why := why_not(trials.again):
        return skipped(check, why)
    found = _apart(trials, 0, RESTORED_AT)
    figure = f"{max(found):.1e} apart in {len(found)} updates" if max(found) else f"equal in {len(found)} updates"
    if SAME < max(found) <= NEAR:
        return finding(check, Verdict.WARN, figure, "nearly: ties, the order of a set, or how threads add")
    return finding(
        check,
        Verdict.PASS if max(found) <= SAME else Verdict.FAIL,
        figure,
        "seed Python, NumPy and torch before the model is built (seed=0 seeds the data); no time or hash() in a seed",
    )


def resume(trials: Trials) -> Finding:
    """Saved and loaded in the middle, all that is saved thrown away between; the data's position is not part of it."""
    check = "save, load and resume agree"
    if why := why_not(trials.again):
        return skipped(check, why)
    if trials.again.fact("restored_at") is None:
        return skipped(
            check, f"{len(trials.again.updates)} updates" if not trials.again.code else trials.again.last_line
        )
    if max(_apart(trials, 0, RESTORED_AT)) > SAME:
        return skipped(check, "two runs do not agree anyway")
    found = _apart(trials, RESTORED_AT)
    if not found:
        return skipped(check, f"{len(trials.again.updates)} updates")
    size = (trials.again.fact("restored_bytes") or 0) / 2**20
    figure = f"{max(found):.1e} apart" if max(found) else "equal"
    return finding(
        check,
        Verdict.PASS if max(found) <= SAME else Verdict.FAIL,
        f"{figure} in {len(found)} updates after it ({size:.0f} MiB)",
        "what training needs must be in the model's state_dict (register_buffer), the optimizer or save(**extra)",
    )
