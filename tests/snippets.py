"""What of the documents can be run, and how each piece is tried: the table of `tests/test_documents.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)  # an item of a list indents its block
INLINE = re.compile(r"`([^`]+)`")
RUNNABLE = re.compile(
    r"(accel|python|torchrun|yolo|pip|make|mkdocs) [\w.\"-]"
    r"|(easyocr|result|trainer|accel)\.\w+\(|with accel|(fit|attach)\("
)


@dataclass(frozen=True)
class Snippet:
    """A block, a command or an inline piece of a document.

    Attributes:
        language: a fenced block's; else `command` (a line of such a block), `inline` or `text`.
    """

    language: str
    text: str


class Run(Enum):
    """How a snippet is tried."""

    PYTHON = "executed by the document's own test"
    COMMAND = "executed as a command by the document's own test"
    FILE = "written as a file of the test's folder"
    QUOTED = "its lines stand in the document named beside it, whose test runs them"
    SHOWN = "a picture of folders, figures or a form: nothing to run"
    ELSEWHERE = "run by the test or benchmark named beside it"
    CHECKED = "needs what is named beside it: only its syntax and its names are checked"


FIT = 'from plugins.easyocr import fit\n\nresult = fit("my_lines.yaml")'

# First words of a snippet -> (how it is tried, a file or a reason). The longest match counts.
TABLE: dict[str, tuple[Run, str]] = {
    # Lightning
    "from lightning.pytorch import Trainer": (Run.ELSEWHERE, "tests/lightning/test_adapter.py"),
    "AccelLightning(weight=lambda batch: count)": (Run.ELSEWHERE, "tests/lightning/test_adapter.py"),
    # Ultralytics
    "yolo train model=yolov8n.pt": (Run.COMMAND, ""),
    "yolo train resume": (Run.COMMAND, ""),
    "yolo train …": (Run.SHOWN, ""),
    "python -m plugins.yolo train …": (Run.SHOWN, ""),
    "from plugins.yolo import attach": (Run.PYTHON, ""),
    "attach(model, effective_batch=64)": (Run.ELSEWHERE, "tests/ultralytics/test_plug.py"),
    # Hugging Face
    "from plugins.hf import AccelCallback": (Run.PYTHON, ""),
    "trainer.add_callback(AccelCallback)": (Run.ELSEWHERE, "tests/huggingface/test_plug.py"),
    "torchrun --nproc_per_node=N": (Run.SHOWN, ""),
    "torchrun --nnodes=2": (Run.CHECKED, "two machines"),
    "yolo train device=0,1": (Run.ELSEWHERE, "tests/ultralytics/test_ranks.py"),
    # EasyOCR
    "lines/train/labels.csv": (Run.SHOWN, ""),
    "experiment_name: my_lines": (Run.FILE, "my_lines.yaml"),
    FIT + "  # the official": (Run.QUOTED, "docs/easyocr.md"),
    FIT + "  # options": (Run.PYTHON, ""),
    "result.reader(detector=False)": (Run.PYTHON, ""),
    "result.reader()": (Run.PYTHON, ""),
    "easyocr.Reader([": (Run.PYTHON, ""),
    "accel fit my_lines.yaml": (Run.COMMAND, ""),
    "fit(config, train=dataset": (Run.ELSEWHERE, "tests/easyocr/test_fit.py"),
    "fit(…": (Run.SHOWN, ""),
    "python examples/easyocr_finetune.py": (Run.ELSEWHERE, "tests/easyocr/test_example.py"),
    # Any loop
    "from plugins.loop import Accelerated": (Run.PYTHON, ""),
    "for images, labels in loader": (Run.PYTHON, ""),
    "accel.flush()": (Run.PYTHON, ""),
    "accel.weights()": (Run.PYTHON, ""),
    "with accel.validation() as model:": (Run.PYTHON, ""),
    # The command line
    "accel doctor": (Run.COMMAND, ""),
    "accel preflight": (Run.ELSEWHERE, "tests/preflight/test_command.py"),
    "┃ check": (Run.SHOWN, ""),
    "$ accel preflight": (Run.SHOWN, ""),
    "accel report FOLDER": (Run.COMMAND, ""),
    "accel report RUN RUN2": (Run.COMMAND, ""),
    "accel.log_loss(": (Run.ELSEWHERE, "tests/loop/test_log_loss.py"),
    "B is 1.": (Run.ELSEWHERE, "tests/test_report_command.py"),
    "accel repair FILE": (Run.COMMAND, ""),
    "$ accel repair": (Run.SHOWN, ""),
    "accel find-batch": (Run.ELSEWHERE, "tests/find_batch/test_command_line.py"),
    "accel fit CONFIG": (Run.SHOWN, ""),
    "limit 1.50 GiB": (Run.SHOWN, ""),
    "accel cache list": (Run.COMMAND, ""),
    "accel cache prune --older-than 0": (Run.COMMAND, ""),
    "accel bench": (Run.ELSEWHERE, "tests/test_bench.py"),
    # Set-up, examples and benchmarks
    "pip install": (Run.CHECKED, "the network; tests/packaging installs the wheel"),
    "make": (Run.CHECKED, "minutes, and an environment of its own"),
    "python examples/why.py": (Run.CHECKED, "minutes"),
    "python examples/why_hf.py": (Run.CHECKED, "minutes"),
    "python examples/gpu_check.py": (Run.ELSEWHERE, "tests/test_gpu_check.py"),
    "python benchmarks/picture.py": (Run.ELSEWHERE, "tests/test_documents.py"),
    "python benchmarks/": (Run.CHECKED, "minutes: benchmarks"),
    # Pictures
    "accel_plugins.pth": (Run.SHOWN, ""),
    "stateDiagram-v2": (Run.SHOWN, ""),
}


def snippets(text: str) -> Iterator[Snippet]:
    """In the document's order of kinds: fenced blocks (commands a line each), then what can be run inline."""
    for language, block in ((language, dedent(block)) for language, block in FENCED.findall(text)):
        if not language and RUNNABLE.match(block):
            yield from (Snippet("command", line.partition(" #")[0].strip()) for line in block.splitlines() if line)
        else:
            yield Snippet(language or "text", block)
    for piece in INLINE.findall(FENCED.sub("", text)):
        line = " ".join(piece.split())
        if RUNNABLE.match(line):
            yield Snippet("inline", line)


def of(document: str) -> dict[Snippet, tuple[Run, str]]:
    """Every snippet of a document, each once, and how it is tried.

    Raises:
        AssertionError: the table does not know one.
    """
    text = (ROOT / document).read_text(encoding="utf-8")
    return {snippet: tried(snippet) for snippet in snippets(text)}


def tried(found: Snippet) -> tuple[Run, str]:
    """How it is tried, and the file or reason that stands beside it.

    Raises:
        AssertionError: the table does not know it.
    """
    starts = [start for start in TABLE if found.text.startswith(start)]
    assert starts, f"no way to try: {found.text[:80]!r}"
    return TABLE[max(starts, key=len)]


def code(document: str, kind: Run, *languages: str) -> list[str]:
    """The texts of one kind in a document, of these languages."""
    return [
        s.text for s, (how, _) in of(document).items() if how is kind and (s.language in languages or not languages)
    ]
