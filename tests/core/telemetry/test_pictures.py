"""What is drawn of a run, and that there is nothing where there is nothing to draw."""

from __future__ import annotations

from xml.etree import ElementTree

from plugins.core.telemetry.losses import LossFacts
from plugins.core.telemetry.pictures import MOST_BARS, in_time, of_candidates, of_losses, of_memory, of_updates, thinned
from plugins.core.telemetry.report import Report
from plugins.core.telemetry.series import Series
from plugins.core.telemetry.svg import POINTS


def series(updates: int) -> Series:
    made = Series()
    for n in range(updates):
        made.seconds.append(1.0 if n else 30.0)
        made.waits.append(0.25)
        made.norms.append(float(n) if n != 2 else float("nan"))
        made.memory.append(2.0)
        made.padding.append(0.1)
    made.compiled_at, made.switched_at = [0, 7], [7, 10**6]
    return made


def words(drawing: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(drawing).iter("text")]


def test_nothing_to_draw_is_no_picture() -> None:
    empty = Report("test", {}).data()
    assert of_losses(LossFacts()) == []
    assert of_losses(LossFacts("epoch", [(1, None)], [(1, None)])) == []
    assert of_candidates(empty["speed"]) == []
    assert of_memory(empty["memory"]) == []
    assert of_updates(None) == []
    assert of_updates(series(1)) == []


def test_training_and_validation_are_one_picture_with_its_sentence() -> None:
    (picture,) = of_losses(LossFacts("epoch", [(1, 3.0), (2, 2.0)], [(1, 3.5), (2, 2.5), (3, 2.0)]))
    root = ElementTree.fromstring(str(picture.drawing))
    assert len(list(root.iter("polyline"))) == 2
    assert [name for _, name in picture.legend] == ["training", "validation", "lowest validation: 2"]
    assert "No sign of overfitting" in picture.words
    assert "validation from 3.5 to 2" in root.attrib["aria-label"]
    assert "epoch" in words(str(picture.drawing))


def test_a_bar_a_candidate_and_the_one_in_force_is_named() -> None:
    speed = Report("test", {}).data()["speed"]
    speed["plan"] = "bf16"
    speed["candidates"] = [
        {"plan": "host", "step_seconds_median": 0.124, "spread_seconds": 0.004},
        {"plan": "bf16", "step_seconds_median": 0.062},
        *({"plan": "odd", "step_seconds_median": wrong} for wrong in (None, "x", -1, True, 10**400, 0)),
    ]
    (picture,) = of_candidates(speed)
    assert words(str(picture.drawing)) == ["host", "124 ms", "bf16", "62 ms"]
    assert "in force: bf16." in picture.words
    speed["candidates"] = speed["candidates"][:1] * 1000
    (picture,) = of_candidates(speed)
    assert len(words(str(picture.drawing))) == 2 * MOST_BARS
    assert f"{1000 - MOST_BARS} more" in picture.words


def test_memory_against_its_limit() -> None:
    memory = Report("test", {}).data()["memory"]
    memory.update(kind="cuda", first_step_peak_gib=6.0, steady_peak_gib=4.0, limit_gib=8.0)
    (picture,) = of_memory(memory)
    assert "limit 8 GiB" in words(str(picture.drawing))
    assert "75% of the 8 GiB" in picture.words
    memory["limit_gib"] = None
    (picture,) = of_memory(memory)
    assert "limit" not in str(picture.drawing)


def test_all_that_a_run_counted_is_drawn_with_its_compiles_and_switches() -> None:
    found = of_updates(series(2500))
    assert found[0].title == "seconds an update"
    assert len(found) == 5
    assert sum(len(p.drawing) for p in found) < 60_000  # of a long run too
    for picture in found:
        lines = [line.attrib["class"] for line in ElementTree.fromstring(str(picture.drawing)).iter("line")]
        assert lines.count("mark compiled") == 2
        assert lines.count("mark switched") == 1  # not what lies behind the end
    assert [name for _, name in found[0].legend] == ["compiled", "another plan"]


def test_without_padding_there_is_no_picture_of_it() -> None:
    made = series(5)
    made.padding = type(made.padding)("d", [0.0] * 5)
    assert "share of padding" not in [p.title for p in of_updates(made)]


def test_a_long_curve_is_thinned_to_means() -> None:
    assert thinned([1.0, 3.0] * POINTS) == [(float(at), 2.0) for at in range(0, 2 * POINTS, 2)]
    assert thinned([1.0, float("nan"), 3.0, 1e300]) == [(0.0, 1.0), (2.0, 3.0)]
    assert thinned([]) == []


def test_times_have_the_unit_that_suits_them() -> None:
    assert [in_time(s) for s in (0.0612, 1.5)] == ["61.2 ms", "1.5 s"]
