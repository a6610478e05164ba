"""What a compile would meet: tried with torch's front half (aot_eager), which captures graphs and writes no code."""

from __future__ import annotations

from pathlib import Path

from plugins.preflight.gradients import tolerance
from plugins.preflight.repeating import seeds
from plugins.preflight.trials import Trials, difference, why_not
from plugins.preflight.verdict import Finding, Verdict, finding, listed, skipped

MOST = 10.0  # times the tolerance of one update that six may drift apart


def _not_compiled(trials: Trials) -> str:
    if trials.first.fact("compiled_by_owner"):
        return "the model is compiled by its owner"
    if why := why_not(trials.compiled):
        return why
    facts = trials.compiled.report["compile"]
    return "" if facts["decision"] != "eager" or facts["graphs"] else str(facts["reason"])


def equals_eager(trials: Trials) -> Finding:
    """The same updates, eagerly and through the compiler's graphs."""
    check = "compiled equals eager"
    if why := _not_compiled(trials) or why_not(trials.accumulated):
        return skipped(check, why)
    pairs = list(zip(trials.compiled.updates, trials.accumulated.updates, strict=False))
    found = [apart for one, other in pairs if (apart := difference(one, other)) is not None]
    if not found:
        return skipped(check, "every update was skipped")
    figure = f"gradients {found[0]:.1e} off at the first update, {max(found):.1e} in {len(found)} (aot_eager)"
    if found[0] <= tolerance(trials) and max(found) <= MOST * tolerance(trials):
        return finding(check, Verdict.PASS, figure)
    if seeds(trials).verdict is not Verdict.PASS:
        return skipped(check, "two runs do not agree anyway")
    return finding(check, Verdict.FAIL, figure, "compile=off, or compile_exclude= for the part")


def graph_breaks(trials: Trials) -> Finding:
    """Where the compiler could not go on, with the lines."""
    check = "graph breaks"
    if why := _not_compiled(trials):
        return skipped(check, why, "compile=off, or see the reason")
    facts = trials.compiled.report["compile"]
    if not facts["graph_breaks"]:
        return finding(check, Verdict.PASS, f"none in {facts['graphs']} graphs")
    return finding(
        check,
        Verdict.WARN,
        f"{facts['graph_breaks']}: {listed([_short(line) for line in facts['graph_break_reasons']], 3)}",
        "a branch on data, a print or an item() in the forward: write it with torch.where, or move it out",
    )


def _short(line: str) -> str:
    """`FILE:LINE: reason` without the folder, and the first words of the reason."""
    place, _, words = line.partition(": ")
    return f"{Path(place).name} {words.strip()[:60]}"


def budget(trials: Trials) -> Finding:
    """Graphs that the data's true shapes need, against recompile_budget."""
    check = "graphs against the budget"
    if why := _not_compiled(trials):
        return skipped(check, why)
    facts, shapes = trials.compiled.report["compile"], trials.first.report["shapes"]
    seen, met = len(shapes["seen"]), len(trials.compiled.report["shapes"]["seen"])
    figure = (
        f"{facts['graphs']} of {facts['budget']} for {met} shapes; {seen} shapes in {len(trials.first.updates)} updates"
    )
    over = facts["graphs"] > facts["budget"] or facts["decision"] == "eager"
    if over:
        return finding(check, Verdict.FAIL, figure, "buckets=auto, dynamic=mark, or a larger recompile_budget")
    if facts["recompiles"] and facts["graphs"] + seen - met > facts["budget"]:
        return finding(
            check, Verdict.WARN, figure, "the shapes still to come may pass it: buckets=auto, or dynamic=mark"
        )
    return finding(check, Verdict.PASS, figure)
