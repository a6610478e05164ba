"""A report's figures in words, as short as they can be."""

from __future__ import annotations

from plugins.core.telemetry.report import Report
from plugins.core.telemetry.tables import ITEMS, LONGEST, WORDS, candidates, of_run, show, words


def test_every_word_has_its_field() -> None:
    fields = {name for part in Report("loop", {}).data().values() if isinstance(part, dict) for name in part}
    assert set(WORDS) <= fields


def test_settings_keep_their_names() -> None:
    assert words("config", "clip_norm") == "clip_norm"
    assert words("gradients", "clip_norm") == "clipped at norm"
    assert words("speed", "memory_format") == "memory format"


def test_every_part_is_a_table_and_candidates_have_their_own() -> None:
    made = Report("test", {"compile": "off"}, versions={"torch": "2"}, checkpoints=["weights/last.pt"])
    made.speed.candidates = [{"plan": "bf16", "step_seconds_median": 0.5, "loss": 2.5}]
    found = {table.title: table for table in of_run(made.data())}
    assert {"window", "compile", "speed", "memory", "config", "checkpoints", "plans that were tried"} <= set(found)
    assert found["plans that were tried"].rows == [["bf16", "0.5", "-", "-", "2.5"]]
    assert "candidates" not in str(found["speed"].rows)
    assert found["checkpoints"].rows == [("1", "weights/last.pt")]


def test_values_are_short_and_what_is_cut_says_so() -> None:
    assert [show(v) for v in (None, True, 0.123456, [], {"a": 1}, "x")] == ["-", "yes", "0.1235", "-", "a: 1", "x"]
    assert show(list(range(10**5))).endswith("… (100,000 in all)")
    assert show(list(range(10**5))).startswith("0, 1, 2")
    assert show(list(range(10**5))).count(",") == ITEMS + 1
    assert len(show("x" * 10**7)) < LONGEST + 50
    assert len(show(["x" * 10**6] * 100)) < LONGEST + 50


def test_candidates_of_anything_are_shown() -> None:
    assert candidates([{}, {"plan": {"a": [1]}}]).rows == [["-"] * 5, ["a: [1]", "-", "-", "-", "-"]]
