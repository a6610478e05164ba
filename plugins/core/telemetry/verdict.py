"""What a run came to, in sentences: how fast, how exact, what was skipped, what it learnt, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from plugins.core.telemetry.losses import LossFacts, Trend, lowest, sentence, trend

SLOW_LOADER = 0.2  # of the time
NEAR_LIMIT = 0.9  # of memory
MANY_SKIPPED = 0.05  # of updates: fp16's scaler skips some at the start
FEW_SKIPPED = 10
LEVEL = 1.005  # times as fast: below it two plans are equally fast
NAMED = 5  # of a list, in a sentence


class Mark(Enum):
    """How good a finding is."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One sentence, and what it means for the reader."""

    mark: Mark
    words: str


@dataclass(frozen=True)
class Verdict:
    """The headline, one finding a promise, and what to do next; None where that is not asked."""

    headline: str
    findings: list[Finding]
    advice: list[str] | None


def verdict(data: dict[str, Any]) -> Verdict:
    """Judge a run by its report's data."""
    losses = LossFacts(**data["losses"])
    findings = [*_speed(data), *_exact(data), *_skipped(data["window"]), *_learnt(losses)]
    return Verdict(_headline(data), findings, list(_advice(data, losses)))


def faster(speed: dict[str, Any]) -> float | None:
    """How many times as fast as the first plan that was timed the plan in force is; None where that was not measured.

    Candidates come as they were timed. A plan that comes a second time was timed anew: what follows it was compared
    with that timing, so ratios are chained.
    """
    times: dict[str, float] = {}  # relative to the first
    held, unit = "", 0.0
    for candidate in speed["candidates"]:
        name, seconds = str(candidate.get("plan", "")), candidate.get("step_seconds_median")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e15:
            continue
        if name in times or not times:
            held, unit = name, float(seconds)
            times.setdefault(name, 1.0)
        else:
            times[name] = times[held] * seconds / unit
    chosen = times.get(speed["plan"])
    return 1 / chosen if chosen and len(times) > 1 else None


def plain(speed: dict[str, Any]) -> str:
    """The plan that the others were compared with, in words."""
    first = str(speed["candidates"][0].get("plan", "host")) if speed["candidates"] else "host"
    return "the plain plan" if first == "host" else f"plan {first}"


def _headline(data: dict[str, Any]) -> str:
    window, speed, ratio = data["window"], data["speed"], faster(data["speed"])
    if not window["updates"]:
        return "No update was made"
    exact = "exactly the big batch" if window["exact"] else "not exactly the big batch"
    if window["accumulate"] <= 1 and window["exact"]:
        exact = "exact"
    if ratio is not None and ratio > LEVEL:
        return f"{ratio:.2f} times as fast as {plain(speed)}, {exact}"
    if ratio is not None:
        return f"As fast as {plain(speed)}: nothing that was tried paid; {exact}"
    if speed["plan"] != "host":
        return f"Ran {speed['plan']}, {exact}"
    return f"Ran at the host's own speed, {exact}"


def _speed(data: dict[str, Any]) -> Iterator[Finding]:
    speed, compiled, ratio = data["speed"], data["compile"], faster(data["speed"])
    taken = f" An update took {speed['step_seconds_median']:.3g} s." if speed["step_seconds_median"] else ""
    why = f" ({speed['reason']})" if speed["reason"] else ""
    if ratio is not None and ratio > LEVEL:
        words = f"{speed['plan']} takes {1 / ratio:.2f} of the time of {plain(speed)} for a step, as timed in this run"
        yield Finding(Mark.GOOD, f"{words}{why}.{taken}")
    elif speed["candidates"]:
        yield Finding(Mark.NOTE, f"Plans were tried, and the run keeps {speed['plan']}{why}.{taken}")
    elif speed["plan"] != "host":
        yield Finding(Mark.NOTE, f"Plan: {speed['plan']}{why}; this run timed no other.{taken}")
    else:
        yield Finding(Mark.NOTE, f"No other plan was timed{why}.{taken}")
    if compiled["reason"]:
        yield Finding(Mark.NOTE, f"Ran {compiled['decision']}: {compiled['reason']}.")


def _exact(data: dict[str, Any]) -> Iterator[Finding]:
    window, norm = data["window"], data["batchnorm"]
    window_size = f"{window['accumulate']} x {window['micro_batch']}"
    sizes = f"{window['updates']} updates of {window['effective_batch']} samples ({window_size})"
    if window["exact"]:
        yield Finding(Mark.GOOD, f"{sizes}, exactly the big batch.")
    else:
        terms = f" Approximate: {_some(window['approximate_terms'])}." if window["approximate_terms"] else ""
        yield Finding(Mark.NOTE, f"{sizes}, approximately the big batch.{terms}")
    if norm["layers"] and norm["rule"] != "freeze" and window["accumulate"] > 1:
        words = f"BatchNorm aside: its {norm['layers']} layers see micro-batches of {window['micro_batch']}."
        yield Finding(Mark.NOTE, words)


def _skipped(window: dict[str, Any]) -> Iterator[Finding]:
    skipped, dropped = window["skipped_updates"], window["dropped_micro_batches"]
    if skipped:
        yield Finding(Mark.BAD if _many(window) else Mark.NOTE, f"{skipped} updates skipped for a non-finite gradient.")
    if dropped:
        yield Finding(Mark.NOTE, f"{dropped} micro-batches dropped, of windows that were never finished.")
    if not skipped and not dropped and window["updates"]:
        yield Finding(Mark.GOOD, "Nothing was skipped or dropped.")


def _many(window: dict[str, Any]) -> bool:
    return bool(window["skipped_updates"] > max(FEW_SKIPPED, MANY_SKIPPED * window["updates"]))


def _learnt(losses: LossFacts) -> Iterator[Finding]:
    marks = {Trend.OVERFITTING: Mark.BAD, Trend.RISING: Mark.BAD, Trend.UNKNOWN: Mark.NOTE}
    if words := sentence(losses):
        yield Finding(marks.get(trend(losses), Mark.GOOD), words)


def _advice(data: dict[str, Any], losses: LossFacts) -> Iterator[str]:
    window, speed, memory, best = data["window"], data["speed"], data["memory"], lowest(losses.valid)
    if not window["updates"]:
        yield "Look at the warnings: no update was made, so nothing was learnt."
    found = trend(losses)
    if best is not None and found is Trend.OVERFITTING:
        yield f"Take the weights of {losses.unit} {best[0]:g}; more data, augmentation or weight decay help further."
    if best is not None and found is Trend.RISING:
        yield f"Lower the learning rate, and take the weights of {losses.unit} {best[0]:g}."
    if found is Trend.FALLING:
        yield "Train longer: the validation loss was still falling."
    if _many(window):
        yield "Lower the learning rate, or look for bad samples: many updates had a gradient that is not finite."
    if (waiting := speed["loader_wait_fraction"] or 0.0) > SLOW_LOADER:
        yield f"Feed it faster: {waiting:.0%} of the time waits for data (more loader workers, a cached data set)."
    if names := data["gradients"]["without_gradient"]:
        yield f"Freeze or use the parameters that got no gradient: {_some(names)}."
    if data["batchnorm"]["micro_batch_too_small"]:
        yield "Set batchnorm=freeze when fine-tuning, or take larger micro-batches: BatchNorm sees too few samples."
    if data["compile"]["decision"] != "eager" and data["compile"]["graph_breaks"]:
        yield f"Look at the {data['compile']['graph_breaks']} graph breaks in the table of compile: each costs speed."
    peak, limit = memory["steady_peak_gib"] or memory["first_step_peak_gib"], memory["limit_gib"]
    if peak and limit and peak > NEAR_LIMIT * limit:
        yield f"Take smaller micro-batches at the same effective batch: the peak is at {peak / limit:.0%} of memory."


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
