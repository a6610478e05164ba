"""Do gradients reach what is to be trained, and is an update that of the big batch."""

from __future__ import annotations

from plugins.preflight.trials import Trials, difference, why_not
from plugins.preflight.verdict import Finding, Verdict, finding, listed, skipped

EXACT = {"float32": 1e-3, "": 1e-3, "float64": 1e-6}  # relative, of sketches of 16 sums; half precision: 0.1
HALF = 0.1


def tolerance(trials: Trials) -> float:
    """By the autocast that the model ran in."""
    return EXACT.get((trials.first.fact("placement") or {}).get("autocast", ""), HALF)


def reach(trials: Trials) -> Finding:
    """Trainable parameters without a gradient, with a zero one, or that the optimizer does not hold."""
    first, check = trials.first, "gradients reach every trainable parameter"
    missing, held = first.fact("without_gradient") or [], first.fact("not_held") or []
    zero, many = first.fact("zero_gradient") or [], first.fact("trainable") or 0
    if missing:
        return finding(
            check,
            Verdict.FAIL,
            f"{len(missing)} of {many} got none: {listed(missing)}",
            "a branch is cut off (detach, no_grad, unused): connect it, or set requires_grad=False",
        )
    if held:
        return finding(
            check,
            Verdict.WARN,
            f"{len(held)} are in no group of the optimizer: {listed(held)}",
            "give them to the optimizer, or set requires_grad=False",
        )
    if zero:
        return finding(
            check, Verdict.WARN, f"{len(zero)} of {many} are zero: {listed(zero)}", "a dead branch, or one of no weight"
        )
    return finding(check, Verdict.PASS, f"{many} of {many} tensors")


def exact(trials: Trials) -> Finding:
    """One update of a window against the same samples as one batch; dropout off and BatchNorm frozen in both."""
    check, many = "accumulated gradient equals the big batch's", trials.accumulate
    if divided := trials.first.fact("divided_by"):
        return finding(
            check,
            Verdict.FAIL,
            f"the loss is divided by {divided}, the micro-batches of an update, before its backward",
            "leave that division out: the plug weighs micro-batches, so the gradient would be that much too small",
        )
    if many <= 1:
        return finding(check, Verdict.PASS, "no accumulation: every update is one batch")
    terms = trials.window["approximate_terms"]
    window, batch = trials.accumulated_unbucketed, trials.big_batch
    if why := why_not(window) or why_not(batch):
        return skipped(check, why)
    one, other = window.updates[0], batch.updates[0]
    if one["samples"] != other["samples"]:
        return skipped(check, f"{one['samples']} against {other['samples']} samples")
    apart, allowed = difference(one, other), tolerance(trials)
    if apart is None:
        return skipped(check, "the first update was skipped")
    ratio = one["norm"] / other["norm"] if other["norm"] else float("nan")
    figure = f"{many} micro-batches against one batch of {other['samples']}: {apart:.1e} off, norm {ratio:.4g}x"
    if apart <= allowed:
        return finding(check, Verdict.PASS, figure)
    if not alike(one["inputs"], other["inputs"]):
        return skipped(check, "the two runs saw other samples")
    if abs(ratio * many - 1) < 0.01:
        return finding(check, Verdict.FAIL, figure, f"the loss is divided by {many} twice: leave out your own division")
    if terms:
        return finding(check, Verdict.WARN, f"{figure}; approximate: {listed(terms)}", "expected of these terms")
    return finding(
        check,
        Verdict.FAIL,
        figure,
        "the loss is no mean over weight= targets: give their count, or a loss that can be split",
    )


def alike(one: list[float], other: list[float]) -> bool:
    """Whether two updates saw inputs of the same sum of squares, which are exact but for the order of adding."""
    return abs(one[1] - other[1]) <= 1e-6 * max(abs(one[1]), abs(other[1]))
