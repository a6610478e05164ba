"""What keeps the device waiting: the loader, and values that the host reads back."""

from __future__ import annotations

from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict, finding, skipped

WAITS, STARVES = 0.2, 0.5  # of an update's time


def loader(trials: Trials) -> Finding:
    """The share of the time that goes into waiting for data; the first update, in which workers start, apart."""
    check, updates = "loader's share of the time", trials.first.updates
    if len(updates) < 3:
        return skipped(check, f"{len(updates)} updates")
    waits, works = (sum(u[name] for u in updates[1:]) for name in ("wait", "seconds"))
    share = waits / (waits + works) if waits + works else 0.0
    figure = f"{share:.0%}: {waits / (len(updates) - 1) * 1000:.0f} ms of waiting an update"
    verdict = Verdict.FAIL if share > STARVES else Verdict.WARN if share > WAITS else Verdict.PASS
    return finding(check, verdict, figure, "more loader workers, pinned memory, or a cached data set")


def host_reads(trials: Trials) -> Finding:
    """Values read from the device in one update, by line."""
    first, check = trials.first, "host reads that stall the device"
    reads = first.fact("host_reads")
    if reads is None:
        return skipped(check, f"{len(first.updates)} updates")
    many = first.fact("of_micro_batches") or 1
    lines = sorted(reads, key=lambda line: -reads[line])
    figure = f"{sum(reads.values()) / many:g} a micro-batch" + (f": {', '.join(lines[:3])}" if lines else "")
    if (first.fact("begun") or {}).get("device") == "cpu":
        return finding(check, Verdict.PASS, f"{figure} (nothing to stall on a CPU)")
    return finding(
        check, Verdict.WARN if lines else Verdict.PASS, figure, "read once in many updates (.item(), print, if tensor)"
    )
