"""Axes and shapes of the pictures."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.core.telemetry.svg import Bar, Line, bars, log_ticks, number, plot, ticks

finite = st.floats(-1e29, 1e29, allow_nan=False)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.3, 5, [1, 2, 3, 4, 5]), (3, 3, [3]), (0, 2400, [0, 500, 1000, 1500, 2000])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_log_ticks_are_1_2_5_or_powers_of_ten() -> None:
    assert log_ticks(0.25, 6, 5) == pytest.approx([0.5, 1, 2, 5])
    assert log_ticks(1e-3, 1e3, 7) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10, 100, 1000])
    assert len(log_ticks(1e-20, 1e20, 5)) <= 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8), st.booleans())
def test_any_finite_points_are_drawn_inside_the_picture(points: list[tuple[float, float]], log: bool) -> None:
    if log:
        points = [(x, abs(y) + 1e-9) for x, y in points]
    drawn = ElementTree.fromstring(
        str(plot("a label", [Line("a", "one", points, dots=True)], 100, log, across="update"))
    )
    for circle in drawn.iter("circle"):
        assert 0 <= float(circle.attrib["cx"].rstrip("%")) <= 100
        assert 0 <= float(circle.attrib["cy"]) <= 100
    (line,) = drawn.iter("polyline")
    for pair in line.attrib["points"].split():
        assert all(math.isfinite(float(v)) for v in pair.split(","))


def test_words_from_outside_are_escaped() -> None:
    hostile = '"><script>alert(1)</script>'
    for drawn in (
        plot(hostile, [Line(hostile, "one", [(0, 1), (1, 2)])], 100, across=hostile),
        bars(hostile, [Bar(hostile, 1.0, hostile)], (2.0, hostile)),
    ):
        root = ElementTree.fromstring(str(drawn))
        assert root.attrib["aria-label"] == hostile
        assert not list(root.iter("script"))


def test_a_bar_is_as_long_as_its_share_of_the_longest_or_of_the_limit() -> None:
    def widths(drawn: str) -> list[str]:
        return [r.attrib["width"] for r in ElementTree.fromstring(drawn).iter("rect") if r.attrib["class"] != "track"]

    rows = [Bar("a", 2.0, "2"), Bar("b", 1.0, "1")]
    assert widths(str(bars("", rows))) == ["80.00%", "40.00%"]
    assert widths(str(bars("", rows, (4.0, "limit")))) == ["40.00%", "20.00%"]
    assert widths(str(bars("", [Bar("nothing", 0.0, "0")]))) == ["0.00%"]


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0.123456, 12.0, 1234567.0, 1e20)] == ["0.1235", "12", "1,234,567", "1e+20"]
