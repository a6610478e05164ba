"""Two runs side by side: which is faster, the same job or not, what differs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.core.telemetry.comparison import Comparison, NotComparable, compare
from plugins.core.telemetry.report import Report
from plugins.core.telemetry.verdict import Mark
from tests.core.telemetry.hostile import hostile
from tests.core.telemetry.test_html import Reader


def run(seconds: float | None = 0.5, size: int = 8, **fields: Any) -> dict[str, Any]:
    made = Report("loop", {"compile": "off"}, device="cpu", model="Net", parameters=100, versions={"torch": "2.8.0"})
    made.window.updates = 10
    made.window.effective_batch = size
    made.speed.step_seconds_median = seconds
    made.speed.samples_per_second = size / seconds if seconds else None
    data = made.data()
    for name, value in fields.items():
        part, _, field = name.partition("__")
        if field:
            data[part][field] = value
        else:
            data[part] = value
    return data


def text(found: Comparison) -> str:
    return " ".join([found.verdict.headline, *(finding.words for finding in found.verdict.findings)])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (run(0.5), run(0.25), "B is 2 times as fast as A per update (the same job)"),
        (run(0.25), run(0.5), "A is 2 times as fast as B per update (the same job)"),
        (run(0.5), run(0.51), "A and B are equally fast per update, within 3% (the same job)"),
        # half the time an update, but as long in all: B waits for data
        (
            run(0.5),
            run(0.25, speed__loader_wait_fraction=0.5),
            "A and B are equally fast per update, within 3% (the same",
        ),
        # other windows: an update is another amount of work, so samples are compared
        (run(0.5, 8), run(0.75, 16), "B is 1.33 times as fast as A per sample (another job)"),
        (run(0.5), run(0.25, model="Other"), "B is 2 times as fast as A per update (another job)"),
    ],
)
def test_which_is_faster_and_whether_it_is_the_same_job(a: Any, b: Any, expected: str) -> None:
    assert compare(a, b).verdict.headline.startswith(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": "NVIDIA H200"}, "device cpu against NVIDIA H200"),
        ({"parameters": 200}, "parameters 100 against 200"),
        ({"size": 16}, "effective batch 8 against 16"),
        ({"shapes__seen": [[8, 5]]}, "no input shape in common"),
    ],
)
def test_what_makes_it_another_job_is_named(fields: dict[str, Any], expected: str) -> None:
    found = compare(run(shapes__seen=[[8, 3]]), run(**fields))
    if "shapes__seen" not in fields:
        assert "no input shape" not in text(found)
    assert expected in text(found)
    assert found.verdict.findings[0].mark is Mark.BAD


def test_what_an_old_report_does_not_say_is_no_difference_of_the_job() -> None:
    found = compare(run(), run(model="", parameters=0))
    assert "(the same job)" in found.verdict.headline
    assert "(device, effective batch)" in text(found)


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        (run(host="ultralytics"), "host: A has loop and B ultralytics"),
        (run(schema=2), "schema: A has 1 and B 2"),
        (run(None), "B has no timed update"),
        (run(0.0), "B has no timed update"),
        (run(-1.0), "B has no timed update"),
    ],
)
def test_what_cannot_be_compared_is_one_line(b: Any, expected: str) -> None:
    with pytest.raises(NotComparable, match=expected) as refused:
        compare(run(), b)
    assert "\n" not in str(refused.value)


def test_figures_have_ratios_where_both_are_numbers_of_one_kind() -> None:
    a = run(memory__kind="cuda", memory__steady_peak_gib=4.0, losses__valid=[(1, 2.0), (2, 1.0)])
    b = run(0.25, memory__kind="cuda", memory__steady_peak_gib=2.0, losses__valid=[(1, 2.0), (2, None)])
    rows = {row[0]: tuple(row[1:]) for row in compare(a, b).figures.rows}
    assert rows["s an update (median)"] == ("0.5", "0.25", "0.5")
    assert rows["GiB at the peak of later updates"] == ("4", "2", "0.5")
    assert rows["last validation loss"] == ("1", "2", "2")
    assert rows["updates skipped (gradient not finite)"] == ("0", "0", "-")
    b["memory"]["kind"] = "rss"
    found = compare(a, b)
    assert {row[0]: row[3] for row in found.figures.rows}["GiB at the peak of later updates"] == "-"
    assert "Peak memory" not in text(found)


def test_settings_versions_and_choices_that_differ_are_listed_and_equal_ones_are_not() -> None:
    a = run(config={"compile": "off", "seed": 1})
    b = run(config={"compile": "on", "seed": 1, "new": 2}, versions={"torch": "2.9.0"}, speed__plan="bf16")
    assert compare(a, b).differences.rows == [
        ("speed: plan", "host", "bf16"),
        ("setting: compile", "off", "on"),
        ("setting: new", "-", "2"),
        ("version: torch", "2.8.0", "2.9.0"),
    ]
    assert compare(a, a).differences.rows == []


def test_losses_of_both_are_one_picture_unless_they_count_other_units() -> None:
    a, b = (run(losses__train=[(1, 2.0), (2, 1.0)], losses__valid=[(1, 2.0), (2, 1.5)]) for _ in range(2))
    titles = [picture.title for picture in compare(a, b).pictures]
    assert titles == ["Time of an update", "Loss"]
    b["losses"]["unit"] = "epoch"
    assert [picture.title for picture in compare(a, b).pictures] == ["Time of an update"]


def test_the_page_of_two_runs_has_its_tables_open() -> None:
    page = compare(run(0.5), run(0.25, speed__plan="<b>")).page(("runs/<i>a", "runs/b")).html
    found = Reader(page)
    assert found.named("details") == []
    assert len(found.named("table")) == 2
    assert "A: runs/<i>a" in found.text
    assert not found.named("b")
    assert not found.named("i")


def test_strangers_reports_are_compared_or_refused_without_harm() -> None:
    stranger = hostile()
    with pytest.raises(NotComparable):
        compare(stranger, stranger)  # its times are out of range
    stranger["speed"]["step_seconds_median"] = 0.5
    page = compare(stranger, stranger).page(("a", "b")).html
    assert "<script" not in page
    assert not Reader(page).named("script")
