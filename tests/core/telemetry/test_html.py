"""The page: its parts in their order, nothing of a stranger's runs, and everybody can read it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from plugins.core.telemetry import html
from plugins.core.telemetry.html import render
from plugins.core.telemetry.report import Report
from tests.core.telemetry.hostile import ATTACKS, hostile
from tests.core.telemetry.test_pictures import series

VOID = {"meta", "line", "rect", "circle", "polyline"}


class Reader(HTMLParser):
    """Tags with their attributes in order, and the text; fails where tags do not close in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def full() -> Report:
    made = Report("ultralytics", {"compile": "off"}, device="cpu", model="Net", parameters=3_000_000)
    made.window.updates, made.window.accumulate, made.window.micro_batch, made.window.effective_batch = 7, 4, 2, 8
    made.speed.plan, made.speed.step_seconds_median = "bf16 + channels_last + regional compile", 0.25
    made.speed.candidates = [
        {"plan": "host", "step_seconds_median": 0.1}, {"plan": made.speed.plan, "step_seconds_median": 0.05}
    ]  # fmt: skip
    made.memory.kind, made.memory.steady_peak_gib, made.memory.limit_gib = "cuda", 4.0, 8.0
    made.losses.unit = "epoch"
    made.losses.train, made.losses.valid = [(1, 2.0), (2, 1.0), (3, 0.5)], [(1, 2.0), (2, 1.5), (3, 1.2)]
    made.warnings, made.checkpoints = ["look here"], ["weights/last.pt"]
    return made


@pytest.fixture(scope="module")
def page() -> str:
    return render(full().data(), series(50))


def test_the_verdict_comes_first_then_pictures_then_folded_tables(page: str) -> None:
    text = " ".join(Reader(page).text)
    order = [
        "2.00 times as fast as the plain plan, exactly the big batch", "7 updates of 8 samples", "Nothing was skipped",
        "No sign of overfitting", "What to do next", "Train longer", "look here", "Loss", "Plans that were tried",
        "Memory", "Details", "the run, update by update", "plans that were tried", "window", "checkpoints",
    ]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    tables = Reader(page).named("table")
    assert len(tables) == page.count("<details>") - 1 > 8
    assert page.index("<details>") < page.index("<table>")


def test_nothing_is_fetched_and_nothing_runs(page: str) -> None:
    found = Reader(page)
    assert not {"script", "img", "link", "iframe", "object", "embed", "form", "a"} & {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import|src=", page)
    (policy,) = [m for m in found.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_who_cannot_see_it_is_told(page: str) -> None:
    found = Reader(page)
    assert found.named("html")[0]["lang"] == "en"
    assert len(found.named("h1")) == len(found.named("main")) == 1
    for drawing in found.named("svg"):
        inner = "preserveaspectratio" in drawing
        assert inner or drawing.get("aria-hidden") == "true" or (drawing.get("role") == "img" and drawing["aria-label"])
    assert all(cell.get("scope") in ("col", "row") for cell in found.named("th"))
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in found.named("div") if "role" in region)
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h\d", tag)]
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    labels = [a["aria-labelledby"] for tag, a in found.tags if "aria-labelledby" in a]
    assert set(labels) <= {a.get("id") for _, a in found.tags}


def test_a_stranger_s_report_is_text_only_and_of_bounded_size() -> None:
    page = render(hostile())
    found = Reader(page)
    known = {tag for tag, _ in Reader(render(full().data(), series(50))).tags}
    assert {tag for tag, _ in found.tags} <= known
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert "<script" not in page
    assert any(ATTACKS[0] in text for text in found.text)  # shown as what it is
    assert "{{ 7 * 7 }}" in " ".join(found.text)
    assert len(page) < 2_000_000
    drawn = [a for tag, a in found.tags if tag in VOID for name, a in a.items() if name != "content"]
    assert drawn
    assert not [value for value in drawn if re.search(r"nan|inf", value or "")]


def test_a_run_without_anything_is_a_page() -> None:
    found = Reader(render(Report("loop", {}).data()))
    assert "No update was made" in " ".join(found.text)
    assert found.named("svg") == []


def test_settings_keep_their_names_and_the_rest_is_in_words(page: str) -> None:
    assert "share of the time spent waiting for data" in page
    assert "loader_wait_fraction" not in page
    assert "compile" in page


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_curves_stand_out_in_both_schemes(scheme: str) -> None:
    style = (Path(html.__file__).parent / "page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)
    colours = dict(re.findall(r"--(\w+): (#\w{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--(\w+): (#\w{6})", dark))
    words = [(w, g) for w in ("ink", "soft") for g in ("page", "card", "next", "warned")]
    words += [(mark, "page") for mark in ("good", "note", "bad")]
    shapes = [(shape, "card") for shape in ("one", "two", "good", "bad", "rest")]
    for least, pairs in ((4.5, words), (3.0, shapes)):
        assert [
            (p, contrast(*(colours[c] for c in p))) for p in pairs if contrast(*(colours[c] for c in p)) < least
        ] == []


def test_every_class_of_the_page_has_its_style(page: str) -> None:
    style = (Path(html.__file__).parent / "page.css").read_text(encoding="utf-8")
    used = {name for _, a in Reader(page).tags for name in (a.get("class") or "").split()}
    assert used - set(re.findall(r"\.([a-z]+)", style)) == set()
