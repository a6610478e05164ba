"""Every Python snippet and command of the documents is tried, as a reader of them would try it.

`tests/snippets.py` says how, for each; one that it does not know fails, so that none is written without being tried.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from plugins.cli import app
from plugins.core.autotune.plan_cache import PlanCache
from plugins.core.plan import Plan
from plugins.core.telemetry.report import Report, SpeedFacts
from tests.core.remembered import entry
from tests.easyocr.conftest import draw, write_folder
from tests.loops import data, net
from tests.snippets import DOCUMENTS, ROOT, Run, Snippet, code, of, tried

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
EASYOCR = "docs/easyocr.md"


# -- all documents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_snippet_of_a_document_is_tried_or_checked(document):
    for snippet, (kind, beside) in of(document).items():
        if kind is Run.ELSEWHERE:
            assert (ROOT / beside).is_file(), beside
        elif kind is Run.CHECKED:
            assert beside, "a reason"
            check_command(snippet.text)
        elif kind is Run.QUOTED:
            there = "\n".join(text.text for text in of(beside))
            lines = [line.partition("  #")[0] for line in snippet.text.splitlines()]
            assert [line for line in lines if line not in there] == []
        if snippet.language == "python":
            check_python(snippet.text)


def check_command(command: str) -> None:
    """Its scripts, extras, targets and options are there."""
    first, *words = shlex.split(command)
    if first == "make":
        wanted = next((word for word in words if "=" not in word), "demo")
        assert re.search(rf"^{wanted}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), wanted
    elif first == "python":
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        compile(source, words[0], "exec")
        assert [w for w in words if w.startswith("--") and f'"{w}"' not in source] == []
    elif first == "torchrun":
        for line in command.splitlines():
            launched = get_args_parser().parse_args(shlex.split(line, comments=True)[1:])
            assert launched.training_script.endswith(".py")
    else:
        assert first == "pip"
        extras = re.findall(r"\[(\w+)\]", command)
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert [extra for extra in extras if not re.search(rf"^{extra} = \[", text, re.M)] == []


def check_python(text: str) -> None:
    """It parses, and what it imports is there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_of_a_document_leads_to_a_file(document):
    folder = (ROOT / document).parent
    links = LINK.findall((ROOT / document).read_text(encoding="utf-8"))
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_case_of_a_public_report_names_a_test_that_is_there():
    text = (ROOT / "tests/cases.md").read_text(encoding="utf-8")
    missing, file = [], ""
    for named, test in re.findall(r"`([\w/]*(?:\.py)?)(?:::([\w*]+))?`", text):
        file = named if named.endswith(".py") else file
        if (named and not named.endswith(".py")) or not (named or test):
            continue
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        if test and not re.search(rf"^def {test.replace('*', '.*')}\(", source, re.M):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_every_page_is_in_the_navigation_and_the_readme_is_short():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in DOCUMENTS if name.startswith("docs/") and Path(name).name not in navigation] == []
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_picture_of_the_readme_shows_the_figures_of_benchmarks_md():
    names = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    assert names["PICTURE"].read_text(encoding="utf-8") == names["picture"]()
    assert len(names["ratios"]((ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"))) == 6


def test_a_snippet_that_no_table_knows_is_an_error():
    with pytest.raises(AssertionError, match="no way to try: 'accel new'"):
        tried(Snippet("inline", "accel new"))


# -- a document's own snippets ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that a reader works in; what a run learns is remembered in it alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def execute(text: str, names: dict[str, object]) -> None:
    exec(compile(text, "snippet", "exec"), names)


@pytest.mark.parametrize("document", ["README.md", "docs/loop.md"])
def test_loop_snippets_train_a_tiny_model(document, folder):
    blocks = [text for text in code(document, Run.PYTHON, "python") if "plugins." not in text or "plugins.loop" in text]
    assert blocks
    model = net()
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": list(zip(*(part.split(4) for part in data(12)), strict=True)),
        "epochs": 2,
    }
    for text in blocks:
        execute(text, names)
        assert names["accel"].updates > 0
    for text in code(document, Run.PYTHON, "inline"):
        execute(text + (" assert not model.training" if text.endswith(":") else ""), names)
    assert (folder / "runs" / "mine" / "accel_report.html").is_file()


@pytest.mark.parametrize("document", ["README.md", "docs/huggingface.md"])
def test_hugging_face_snippet_trains_a_tiny_model(document, folder):
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    (text,) = (block for block in code(document, Run.PYTHON, "python") if "plugins.hf" in block)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    rows = [{"input_ids": [1, 2, 3, 4], "attention_mask": [1] * 4, "labels": at % 2} for at in range(32)]
    names = {"model": model, "train": rows, "test": rows[:8], "tokenizer": None}
    execute(text.replace('"out",', '"out", num_train_epochs=1, report_to=[], save_strategy="no", use_cpu=True,'), names)
    assert names["trainer"].state.global_step == 1
    assert (folder / "out" / "accel_report.json").is_file()


SHORT = {"epochs": 1, "imgsz": 32, "workers": 0, "plots": False, "val": False, "device": "cpu"}


@pytest.fixture
def detector(folder):
    """`yolov8n.pt` and `coco8.yaml` of the snippets: a tiny network, and eight drawn pictures."""
    pytest.importorskip("ultralytics")
    from ultralytics import YOLO

    from tests.ultralytics.conftest import write_data, write_model

    YOLO(str(write_model(folder, "detect"))).save("yolov8n.pt")
    shutil.copy(write_data(folder / "pictures", train=8, val=4), "coco8.yaml")
    return folder


def test_ultralytics_snippet_trains_from_python(detector):
    (text,) = (block for block in code("README.md", Run.PYTHON, "python") if "plugins.yolo" in block)
    short = ", ".join(f"{key}={value!r}" for key, value in {**SHORT, "project": str(detector)}.items())
    execute(text.replace("batch=4)", f"batch=4, {short})"), {})
    assert next(detector.rglob("accel_report.json"))


KILLED = """
import os
callbacks = {"on_model_save": lambda trainer: os._exit(9)}
"""


def yolo(document: str, start: str, *more: str) -> list[str]:
    """A document's command, through the module that stands in for the stock one (see ultralytics/test_startup.py)."""
    (command,) = (text for text in code(document, Run.COMMAND) if text.startswith(start))
    return [sys.executable, "-m", "plugins.yolo", *shlex.split(command)[1:], *more]


def test_ultralytics_command_of_the_readme_trains(detector, monkeypatch):
    short = [f"{key}={value}" for key, value in SHORT.items()]
    run(detector, monkeypatch, *yolo("README.md", "yolo train model", *short, f"project={detector}"))
    assert next(detector.rglob("accel_report.json"))


def test_ultralytics_commands_of_its_page_train_and_resume_a_killed_run(detector, monkeypatch):
    """Callbacks of the user's own beside the plug's, as the page says: they kill the run at its first checkpoint."""
    (detector / "my_callbacks.py").write_text(KILLED, encoding="utf-8")
    short = [f"{key}={value}" for key, value in {**SHORT, "epochs": 2, "project": detector / "runs/detect"}.items()]
    train = yolo("docs/ultralytics.md", "yolo train model", *short)
    train = [word.replace("callbacks=plugins.yolo", "callbacks=plugins.yolo,my_callbacks") for word in train]
    run(detector, monkeypatch, *train, wanted=9)
    run(detector, monkeypatch, *yolo("docs/ultralytics.md", "yolo train resume"))
    rows = (detector / "runs/detect/train/results.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 3  # a title and two epochs


def test_commands_of_the_command_line_run(folder):
    for name in ("run", "run2"):
        Report("loop", {}, speed=SpeedFacts(step_seconds_median=0.5)).write(folder / name)
    torch.save({"_orig_mod.weight": torch.zeros(1)}, folder / "wrapped.pt")
    PlanCache(folder / "cache").keep("ab" * 32, entry(Plan()))
    commands = {text for document in DOCUMENTS for text in code(document, Run.COMMAND) if text.startswith("accel ")}
    commands = {text for text in commands if not text.startswith("accel fit")}
    assert len(commands) >= 5
    for command in sorted(commands):
        words = command.replace("FOLDER", "run").replace("RUN", "run").replace("FILE", "wrapped.pt").split()[1:]
        if words[0] == "cache":
            words += ["--folder", str(folder / "cache")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (command, done.output, done.exception)
    assert (folder / "wrapped.clean.pt").is_file()


# -- EasyOCR ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path):
    """A folder as docs/easyocr.md describes it, with EasyOCR's own networks in its user's home."""
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


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *command: str, wanted: int = 0) -> str:
    """Output of a command in `folder`, whose user has never been here before; fails with what it said.

    `wanted` is the exit status.
    """
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    for name in ("EASYOCR_MODULE_PATH", "MODULE_PATH"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == wanted, done.stdout + done.stderr
    return done.stdout


def test_every_line_of_the_easyocr_section_runs(lines, monkeypatch):
    """Offline; the only change is a run of two updates."""
    found = of(EASYOCR)
    assert {Run.PYTHON, Run.COMMAND, Run.FILE, Run.SHOWN, Run.ELSEWHERE} <= {kind for kind, _ in found.values()}
    for snippet, (kind, name) in found.items():
        if kind is Run.ELSEWHERE:
            assert (ROOT / name).is_file()
        if kind is Run.FILE:
            short = re.sub(r"^(num_iter|valInterval): \d+$", r"\1: 2", snippet.text, flags=re.M)
            assert short.count(": 2\n") == 2
            (lines / name).write_text(short, encoding="utf-8")
    (lines / "read.py").write_text("import easyocr\n" + "\n".join(code(EASYOCR, Run.PYTHON)), encoding="utf-8")
    assert "my_lines.pth" in run(lines, monkeypatch, sys.executable, "read.py")

    shutil.rmtree(lines / "saved_models")
    (command,) = code(EASYOCR, Run.COMMAND)
    words = command.split()
    assert words.pop(0) == "accel"
    out = run(lines, monkeypatch, sys.executable, "-m", "plugins.cli", *words)
    (printed,) = (line for line in out.splitlines() if line.startswith("easyocr.Reader("))
    page = f"import easyocr\nprint({printed}.readtext('page.png', detail=0))\n"
    (lines / "page.py").write_text(page, encoding="utf-8")
    assert run(lines, monkeypatch, sys.executable, "page.py").startswith("[")
