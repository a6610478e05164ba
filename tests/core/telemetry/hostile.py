"""A report from a stranger: every string is an attack, every number is out of range, every list is long."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from plugins.core.telemetry.report import Report

ATTACKS = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</style></title></svg><script>document.title='owned'</script>",
    '" onmouseover="document.title=\'owned\'" x="',
    "javascript:document.title='owned'",
    "{{ 7 * 7 }} {% raw %}",
    "\x00\u202e]]>-->",
)


def hostile() -> dict[str, Any]:
    """Its data, as `accel report` reads them from the file."""
    all_of_it = " ".join(ATTACKS)
    raw: dict[str, Any] = Report(all_of_it, {}).data()
    raw.update(device=all_of_it, model=all_of_it, parameters=10**300)
    raw.update(warnings=[*ATTACKS] * 2000, checkpoints=[all_of_it] * 5000, versions=dict.fromkeys(ATTACKS, all_of_it))
    raw["config"] = {**dict.fromkeys(ATTACKS, [all_of_it] * 1000), "deep": [[[{}]]]}
    for part in ("window", "compile", "speed", "memory", "shapes", "gradients", "batchnorm", "ema", "losses"):
        for name, value in raw[part].items():
            if isinstance(value, str):
                raw[part][name] = all_of_it
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                raw[part][name] = 10**300
            elif value is None and name not in ("decay", "break_even_update"):
                raw[part][name] = 1e308
    names = [*ATTACKS] * 1000
    for part, name in (
        ("window", "approximate_terms"),
        ("compile", "graph_break_reasons"),
        ("gradients", "without_gradient"),
    ):
        raw[part][name] = names
    raw["shapes"]["seen"] = [[n, 10**300] for n in range(5000)]
    raw["speed"]["plan"] = ATTACKS[0]
    odd = [float("nan"), float("inf"), -1, 10**300, 1e308, 1e-320, "x", None, [], {}]
    raw["speed"]["candidates"] = [
        {"plan": attack, "step_seconds_median": seconds, "spread_seconds": seconds, "loss": all_of_it}
        for attack in ATTACKS
        for seconds in [0.5, *odd]
    ] * 20
    points = [[n, value] for n, value in enumerate([1.0, float("nan"), 1e308, -1e308, 2.0, None, 1.5] * 1000)]
    raw["losses"].update(unit=all_of_it, train=points, valid=points)
    return TypeAdapter(Report).validate_json(json.dumps(raw)).data()
