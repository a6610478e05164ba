"""The harness of `make bench`: rows run, are kept, and become tables."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks.harness import Contender, Figure, Row, Section
from benchmarks.registry import SECTIONS, rows
from benchmarks.results import Results, ratios, spread
from benchmarks.tables import written


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SCRATCH", tmp_path / "scratch")

    def main(*words):
        files = ["--results", str(tmp_path / "results.json"), "--page", str(tmp_path / "page.md")]
        monkeypatch.setattr(sys, "argv", ["benchmarks", *words, *files])
        assert command.main() == 0
        return json.loads((tmp_path / "results.json").read_text()), (tmp_path / "page.md").read_text()

    return main


@pytest.mark.parametrize(("key", "count"), [("by-rule", 1), ("core-10", 2)])  # a row of steps, one of whole runs
def test_a_row_in_quick_size(bench, capsys, key, count):
    found, page = bench(key, "--quick", "--contenders", str(count))
    entry = found[key]
    assert entry["skipped"] == {}
    assert [list(one) for one in entry["rounds"]] == [[one.name for one in rows()[key].contenders[:count]]]
    assert all(figures["cpu"] > 0 for figures in entry["rounds"][0].values())
    assert entry["versions"]["torch"]
    assert f"(`{key}`)" in page
    capsys.readouterr()
    assert bench(key, "--quick")[0] == found  # what is there is not run again
    assert capsys.readouterr().out == ""


def test_quick_figures_do_not_go_into_the_file_of_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "core-10", "--quick"])
    with pytest.raises(SystemExit):
        command.main()


def test_every_row_has_its_own_key_and_contenders_of_different_names():
    keys = [row.key for section in SECTIONS for row in section.rows]
    assert len(keys) == len(set(keys))
    for row in rows().values():
        names = [one.name for one in row.contenders]
        assert len(names) == len(set(names)) >= 2


def test_ratios_are_of_the_same_round_and_a_table_says_what_is_missing(tmp_path):
    section = Section(
        "speed",
        "Speed",
        "Of two.",
        (Figure("seconds", "s", ratio="ratio"),),
        (Row("two", "a net", (Contender("host", print), Contender("plug", print), Contender("gone", print))),),
    )
    results = Results(tmp_path / "results.json")
    for host, plug in ((1.0, 0.5), (4.0, 1.0), (2.0, 2.0)):
        found = {"host": {"seconds": host}, "plug": {"seconds": plug}}
        results.add(section.rows[0], False, found, {"gone": "no such package"})
    again = Results(results.path)
    assert ratios(again.rounds("two"), "plug", "host", "seconds") == [0.5, 0.25, 1.0]
    page = written("# By hand\n\nkept\n", (section,), again)
    assert "kept" in page
    assert "| a net (`two`) | host | 3 (too few) | 2 (1 to 4) | 1 |" in page
    assert "|  | plug | 3 (too few) | 1 (0.5 to 2) | 0.50 (0.25 to 1.00) |" in page
    assert "two, gone: not run: no such package" in page
    assert written(page, (section,), again) == page
    assert spread([], "{}") == "-"
