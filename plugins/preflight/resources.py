"""Memory, disk and versions that the long run will need."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from plugins.core.system.shortage import GIB
from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict, finding, skipped

TIGHT = 0.9  # of what there is
GROWN = 0.05  # GiB that an evaluation may leave
COPIES = 2  # of the logits that an evaluation keeps: as they come, and joined
KEPT = 2  # checkpoints that lie on disk: the last and the best
ADVISED = "accel find-batch finds the largest that fits; accumulate keeps the effective batch"


def memory(trials: Trials) -> Finding:
    """Peaks of the first update and the steady ones, and the forecast for the wanted micro-batch."""
    first, check = trials.first, "memory"
    peaks = [first.fact("first_step_peak_gib"), first.fact("steady_peak_gib")]
    size, free = trials.window.get("micro_batch"), first.fact("free_gib")
    if None in peaks or not size or free is None:
        return skipped(check, "no update")
    peak, sizes = max(*peaks, 0.0), first.fact("bytes")
    # Of every batch alike: what was there before, gradients, and the optimizer's state. Not the memory in use after an
    # update, in which freed blocks that stay with the process are counted.
    held = min(first.fact("begun")["held_gib"] + (sizes["model"] + sizes["optimizer"]) / GIB, peak)
    wanted = trials.job.batch or size
    forecast = held + max(peak - held, 0.0) * wanted / size
    there = free + first.updates[-1]["memory_gib"]
    figure = (
        f"{first.report['memory']['kind']}: first {peaks[0]:.2f}, steady {peaks[1]:.2f} GiB at {size} samples"
        + (f"; {wanted} would take about {forecast:.2f}" if wanted != size else "")
        + f"; {there:.1f} GiB here"
    )
    verdict = Verdict.FAIL if forecast > there else Verdict.WARN if forecast > TIGHT * there else Verdict.PASS
    return finding(check, verdict, figure, ADVISED)


def evaluation(trials: Trials) -> Finding:
    """What evaluations left in memory, and what one that keeps all its outputs would take."""
    first, check = trials.first, "evaluation that keeps all logits"
    grown = [v["after_gib"] - v["before_gib"] for line in first.records if (v := line.get("validation"))]
    facts, free = first.fact("evaluation"), first.fact("free_gib") or 0.0
    if facts and facts["keeps"]:
        each = (first.fact("placement") or {}).get("output", 0)
        size = facts["samples"] * each * 4 * COPIES / GIB
        figure = f"logits of {facts['samples']} samples, {each} numbers each: {size:.2f} of {free:.1f} GiB"
        verdict = Verdict.FAIL if size > free else Verdict.WARN if size > free / 2 else Verdict.PASS
        return finding(
            check,
            verdict,
            figure,
            "preprocess_logits_for_metrics=argmax, batch_eval_metrics=True, or a smaller eval_dataset",
        )
    if grown and sum(grown) > GROWN:
        return finding(
            check,
            Verdict.WARN if sum(grown) < free / 10 else Verdict.FAIL,
            f"{len(grown)} evaluations left {sum(grown):.2f} GiB more in use",
            "keep counts and not outputs; .cpu() or .item() what is kept, and run it without gradients",
        )
    if facts or grown:
        return finding(
            check, Verdict.PASS, "keeps none" if facts else f"{len(grown)} evaluations left {sum(grown):.2f} GiB"
        )
    return skipped(check, "no evaluation within the trial")


def disk(trials: Trials) -> Finding:
    """The space of the checkpoints to come, against what is free where the job runs."""
    first, check = trials.first, "disk for the checkpoints to come"
    sizes = first.fact("bytes")
    if not sizes:
        return skipped(check, "no update")
    average = sizes["model"] if first.report["ema"]["decay"] is not None else 0
    one = (sizes["model"] + sizes["optimizer"] + average) / GIB
    kept = (first.fact("checkpoints") or {}).get("kept") or KEPT
    free = shutil.disk_usage(Path.cwd()).free / GIB
    verdict = Verdict.FAIL if one * (kept + 1) > free else Verdict.WARN if one * (kept + 1) > free / 2 else Verdict.PASS
    return finding(check, verdict, f"{kept} x {one:.2f} GiB of {free:.1f} free here", "keep fewer, or another folder")


def versions(trials: Trials) -> Finding:
    """What is installed, against what this package is tested with."""
    found = {n: v for n, v in trials.first.report["versions"].items() if n not in ("python", "accel-plugins")}
    figure = ", ".join(f"{name} {version}" for name, version in found.items())
    old = [f"{name} {floor}" for name, floor in _floors() if name in found and _parts(found[name]) < _parts(floor)]
    return finding("versions", Verdict.WARN if old else Verdict.PASS, figure, f"at least {', '.join(old)}")


def _floors() -> list[tuple[str, str]]:
    """The oldest releases that this package says it runs with."""
    try:
        lines = requires("accel-plugins") or []
    except PackageNotFoundError:
        return []
    return [(found[1], found[2]) for line in lines if (found := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line))]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
