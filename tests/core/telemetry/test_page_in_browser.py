"""The page in a headless browser: nothing runs, nothing overflows a narrow screen, dark is dark, tables unfold."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plugins.core.telemetry.html import render
from tests.core.telemetry.hostile import hostile
from tests.core.telemetry.test_html import full
from tests.core.telemetry.test_pictures import series

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")

# A page of the test's own holds the report's in frames, and measures them: the report's own policy forbids scripts.
FRAME = '<iframe id="{0}" style="width:{1}px;height:800px;color-scheme:{2}" srcdoc="{3}"></iframe>'
MEASURE = """<pre id="found"></pre><script>
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, view = frame.contentWindow;
    const details = page.querySelector("details"), closed = details && details.querySelector("figure,table");
    const before = closed && closed.checkVisibility();
    if (details) details.querySelector("summary").click();
    found[frame.id] = {
      title: page.title,
      overflow: page.documentElement.scrollWidth - view.innerWidth,
      background: view.getComputedStyle(page.body).backgroundColor,
      scripts: page.scripts.length + page.images.length,
      opens: [before, closed && closed.checkVisibility()],
      curves: [...page.querySelectorAll("polyline")].filter(line => line.getBoundingClientRect().width > 0).length,
      cut: [...page.querySelectorAll("figure > svg text")].filter(text => {
        const box = text.getBoundingClientRect();
        return box.width && (box.left < -1 || box.right > view.innerWidth + 1);
      }).length,
    };
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("browser")
    pages = {"full": render(full().data(), series(50)), "hostile": render(hostile())}
    frames = [
        FRAME.format(f"{name}-{width}-{scheme}", width, scheme, html.escape(pages[name]))
        for name, width, scheme in (("full", 320, "light"), ("full", 900, "dark"), ("hostile", 320, "light"))
    ]
    (folder / "test.html").write_text("<!doctype html>" + "".join(frames) + MEASURE, encoding="utf-8")
    dom = browse(folder, "--dump-dom", f"file://{folder / 'test.html'}")
    match = re.search(r'<pre id="found">(.+?)</pre>', dom, re.S)
    assert match, dom[-500:]
    return dict(json.loads(html.unescape(match[1])))


def browse(folder: Path, *arguments: str) -> str:
    """What headless chromium prints; its profile lies in `folder`."""
    assert BROWSER is not None
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'own'}",
    ]
    command = [BROWSER, *quiet, "--virtual-time-budget=5000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_page_is_laid_out_on_narrow_and_wide_screens(found: dict[str, Any]) -> None:
    for name in ("full-320-light", "full-900-dark", "hostile-320-light"):
        assert found[name]["overflow"] <= 0, name
    for name in ("full-320-light", "full-900-dark"):
        assert found[name]["cut"] == 0, name
        assert found[name]["curves"] >= 2


def test_light_is_light_and_dark_is_dark(found: dict[str, Any]) -> None:
    assert found["full-320-light"]["background"] == "rgb(251, 251, 250)"
    assert found["full-900-dark"]["background"] == "rgb(21, 23, 26)"


def test_what_is_folded_unfolds(found: dict[str, Any]) -> None:
    assert found["full-320-light"]["opens"] == [False, True]


def test_nothing_of_a_stranger_s_report_runs(found: dict[str, Any]) -> None:
    assert found["hostile-320-light"]["title"].startswith("accel report: <script>")
    assert found["hostile-320-light"]["scripts"] == 0
