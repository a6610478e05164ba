"""The page of mistakes, whatever the length of its lines."""

from __future__ import annotations

import warnings

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from integrations.easyocr import mistakes_picture
from integrations.easyocr.data import Skipped, read_folder
from integrations.easyocr.reading import Readings
from tests.easyocr.conftest import write_folder


def page(tmp_path, monkeypatch, labels, read):
    drawn = []
    monkeypatch.setattr(mistakes_picture, "_save", lambda figure, path, writer: drawn.append(figure))
    lines = read_folder(write_folder(tmp_path / "x", labels), "valid_data", Skipped())
    count = len(labels)
    readings = Readings([read] * count, [0.5] * count, labels, list(range(count)), 0.0, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mistakes_picture.mistakes(readings, lines, tmp_path / "mistakes.png", None)
        renderer = FigureCanvasAgg(drawn[0]).get_renderer()
        drawn[0].draw(renderer)
    return drawn[0], renderer


@pytest.mark.parametrize(("length", "columns"), [(5, 3), (60, 2), (90, 1), (150, 1), (400, 1)])
def test_titles_stay_in_their_own_cell(tmp_path, monkeypatch, length, columns):
    labels = [f"{'The center of this grid ' * 20}"[: length - 1] + str(i) for i in range(7)]
    figure, renderer = page(tmp_path, monkeypatch, labels, "x" * length)
    boxes = [axes._left_title.get_window_extent(renderer) for axes in figure.axes]
    boxes += [axes.get_window_extent(renderer) for axes in figure.axes]
    assert len(boxes) == 14
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert len({round(box.x0) for box in boxes[:7]}) == columns
    for axes, label in zip(figure.axes, labels, strict=True):
        assert label in axes.get_title(loc="left").replace("\n", "")


def test_a_run_without_mistakes_has_a_page(tmp_path, monkeypatch):
    figure, _ = page(tmp_path, monkeypatch, ["12"], "12")
    assert figure.get_suptitle() == "0 of 1 lines misread; the worst 0"
