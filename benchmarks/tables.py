"""Sections of BENCHMARKS.md between markers, from the file of results; what is written by hand around them stays."""

from __future__ import annotations

import re

from benchmarks.harness import Row, Section
from benchmarks.results import Results, ratios, spread, values

WANTED_ROUNDS = 5


def table(section: Section, results: Results) -> str:
    """The section's rows that have results."""
    head = ["what", "contender", "repeats"]
    for figure in section.figures:
        head += [figure.title, *([figure.ratio] if figure.ratio else [])]
    lines = [cells(head), cells(["---"] * len(head))]
    notes = []
    for row in section.rows:
        rounds = results.rounds(row.key)
        if not rounds:
            notes.append(f"`{row.key}` ({row.what}): not run yet")
            continue
        lines += body(row, section, rounds)
        entry = results.rows[row.key]
        for name, why in entry.get("skipped", {}).items():
            notes.append(f"{row.key}, {name}: not run: {why}")
        notes.append(f"`{row.key}`: {about(entry)}")
    if len(lines) == 2:
        return "\n".join(f"* {note}" for note in notes)
    return "\n".join([*lines, "", *(f"* {note}" for note in notes)])


def body(row: Row, section: Section, rounds: list[dict[str, dict[str, object]]]) -> list[str]:
    lines, base = [], row.contenders[0].name
    what = f"{row.what} (`{row.key}`)"
    for contender in row.contenders:
        name = contender.name
        found = [figure for figure in section.figures if values(rounds, name, figure.key)]
        if not found:
            continue
        count = max(len(values(rounds, name, figure.key)) for figure in found)
        line = [what, name, str(count) + (" (too few)" if count < WANTED_ROUNDS else "")]
        for figure in section.figures:
            line.append(spread(values(rounds, name, figure.key), figure.form))
            if figure.ratio:
                line.append("1" if name == base else spread(ratios(rounds, name, base, figure.key), "{:.2f}"))
        lines.append(cells(line))
        what = ""
    return lines


def about(entry: dict[str, object]) -> str:
    """When, on what, beside which load."""
    machine, versions, load = entry["machine"], entry["versions"], entry["load"]
    assert isinstance(machine, dict)
    assert isinstance(versions, dict)
    assert isinstance(load, list)
    threads = f", {machine['threads']} threads" if machine.get("threads") else ""
    has = f" with {' and '.join(machine['instructions'])}" if machine["instructions"] else ""
    size = ", quick size" if entry.get("quick") else ""
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{entry['date']}, {machine['cores']} cores of {machine['cpu']}{has}{threads}{size}, load {min(load)} to "
        f"{max(load)}; {named}"
    )


def cells(found: list[str]) -> str:
    return f"| {' | '.join(found)} |"


def written(text: str, sections: tuple[Section, ...], results: Results) -> str:
    """BENCHMARKS.md with every section between its markers; a section without any comes at the end."""
    for section in sections:
        begin, end = f"<!-- begin {section.key} -->", f"<!-- end {section.key} -->"
        block = f"{begin}\n{section.text}\n\n{table(section, results)}\n{end}"
        if begin in text:
            text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, b=block: b, text, flags=re.S)
        else:
            text = f"{text.rstrip()}\n\n## {section.title}\n\n{block}\n"
    return text
