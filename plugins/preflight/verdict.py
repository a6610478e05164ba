"""What a check of preflight comes to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Of one check. `SKIP`: it could not be looked at, and the figure says why."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        check: its name.
        verdict: what it came to.
        figure: what was seen, with its unit.
        advice: what to do; empty where there is nothing to do.
    """

    check: str
    verdict: Verdict
    figure: str
    advice: str = ""

    def data(self) -> dict[str, str]:
        """As it stands in the JSON file."""
        return {"check": self.check, "verdict": self.verdict.value, "figure": self.figure, "advice": self.advice}


def finding(check: str, verdict: Verdict, figure: str, advice: str = "") -> Finding:
    """A row of which the advice is left out where all is well."""
    return Finding(check, verdict, figure, "" if verdict is Verdict.PASS else advice)


def skipped(check: str, why: str, advice: str = "") -> Finding:
    """A row of what could not be looked at."""
    return Finding(check, Verdict.SKIP, f"not measured: {why}", advice)


def listed(names: list[str], most: int = 4) -> str:
    """Names in a row, the first few of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
