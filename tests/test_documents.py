"""Every Python line and command of the documents is run, as a reader of them would run it.

A section's snippets are looked up in its table: each is run here, or is run by the named test. A snippet that the
table lacks fails, so that none is written without being tried. To add a section: a table, and a folder for it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from tests.easyocr.conftest import draw, write_folder

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`]+)`")
COMMANDS = ("accel ", "python ", "torchrun ", "easyocr.Reader(", "result.")  # first words of what can be run


@dataclass(frozen=True)
class Snippet:
    """A block or an inline piece of a document. language: of a fenced block, `inline` else."""

    language: str
    text: str


class Run(Enum):
    """How a snippet is tried."""

    PYTHON = "executed in the section's folder"
    COMMAND = "executed as a command there"
    FILE = "written as a file of that folder"
    SHOWN = "a picture of folders or figures: nothing to run"
    ELSEWHERE = "run by the test that stands beside it"


def section(document: str, title: str) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{document} has no section {title}"
    return found[1]


def snippets(text: str) -> Iterator[Snippet]:
    """In the document's order of kinds: fenced blocks, then what can be run inline, on one line each."""
    for language, block in FENCED.findall(text):
        yield Snippet(language, block)
    for piece in INLINE.findall(FENCED.sub("", text)):
        line = " ".join(piece.split())
        if line.startswith(COMMANDS) and (" " in line or "(" in line):
            yield Snippet("inline", line)


# First words of each snippet -> (how it is tried, the file it is written to or the test that runs it).
EASYOCR: dict[str, tuple[Run, str]] = {
    "lines/train/labels.csv": (Run.SHOWN, ""),
    "experiment_name: my_lines": (Run.FILE, "my_lines.yaml"),
    "from plugins.easyocr import fit": (Run.PYTHON, ""),
    "result.reader(detector=False)": (Run.PYTHON, ""),
    "result.reader()": (Run.PYTHON, ""),
    "easyocr.Reader([": (Run.PYTHON, ""),
    "accel fit my_lines.yaml": (Run.COMMAND, ""),
    "python examples/easyocr_finetune.py": (Run.ELSEWHERE, "tests/easyocr/test_example.py"),
    "python benchmarks/easyocr_speed.py": (Run.ELSEWHERE, "benchmarks/easyocr_speed.py"),
}


def tried(found: Snippet, table: dict[str, tuple[Run, str]]) -> tuple[Run, str]:
    starts = [start for start in table if found.text.startswith(start)]
    assert starts, f"no way to try: {found.text[:80]!r}"
    return table[max(starts, key=len)]


@pytest.fixture
def lines(tmp_path):
    """A folder as the EasyOCR section describes it, with EasyOCR's own networks in its user's home."""
    stock = Path(pytest.importorskip("easyocr_en_models").__file__).parent / "models"
    for part in ("train", "valid"):
        write_folder(tmp_path / "lines" / part, ["Total 12.50", "0012"])
    for name in ("page.png", "crop.png"):
        draw("Total 12.50").save(tmp_path / name)
    kept = tmp_path / "home" / ".EasyOCR" / "model"
    kept.mkdir(parents=True)
    for name in ("craft_mlt_25k.pth", "english_g2.pth"):
        (kept / name).symlink_to(stock / name)
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *command: str) -> str:
    """Output of a command in `folder`, whose user has never been here before; fails with what it said."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("EASYOCR_MODULE_PATH", "MODULE_PATH"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_line_of_the_easyocr_section_runs(lines, monkeypatch):
    """Offline; the only change is a run of two updates."""
    found = list(snippets(section("README.md", "EasyOCR")))
    how = {snippet: tried(snippet, EASYOCR) for snippet in found}
    assert {kind for kind, _ in how.values()} == set(Run)
    for snippet, (kind, name) in how.items():
        if kind is Run.ELSEWHERE:
            assert (ROOT / name).is_file()
        if kind is Run.FILE:
            short = re.sub(r"^(num_iter|valInterval): \d+$", r"\1: 2", snippet.text, flags=re.M)
            assert short.count(": 2\n") == 2
            (lines / name).write_text(short, encoding="utf-8")
    code = [snippet.text for snippet, (kind, _) in how.items() if kind is Run.PYTHON]
    (lines / "read.py").write_text("import easyocr\n" + "\n".join(code), encoding="utf-8")
    assert "my_lines.pth" in run(lines, monkeypatch, sys.executable, "read.py")

    shutil.rmtree(lines / "saved_models")
    (command,) = (snippet.text for snippet, (kind, _) in how.items() if kind is Run.COMMAND)
    words = command.split()
    assert words.pop(0) == "accel"
    out = run(lines, monkeypatch, sys.executable, "-m", "plugins.cli", *words)
    (printed,) = (line for line in out.splitlines() if line.startswith("easyocr.Reader("))
    page = f"import easyocr\nprint({printed}.readtext('page.png', detail=0))\n"
    (lines / "page.py").write_text(page, encoding="utf-8")
    assert run(lines, monkeypatch, sys.executable, "page.py").startswith("[")


def test_a_snippet_that_no_table_knows_is_an_error():
    with pytest.raises(AssertionError, match="no way to try: 'accel new'"):
        tried(Snippet("inline", "accel new"), EASYOCR)
