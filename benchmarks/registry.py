"""Every section of `python -m benchmarks`, in the order in which BENCHMARKS.md shows them."""

from __future__ import annotations

from benchmarks.harness import Row, Section
from benchmarks.rows import growth, limit, quality, throughput, whole

SECTIONS: tuple[Section, ...] = (
    *throughput.SECTIONS,
    *whole.SECTIONS,
    *quality.SECTIONS,
    *growth.SECTIONS,
    limit.SECTION,
)


def rows() -> dict[str, Row]:
    """Key -> row."""
    return {row.key: row for section in SECTIONS for row in section.rows}


def row_named(key: str) -> Row:
    return rows()[key]
