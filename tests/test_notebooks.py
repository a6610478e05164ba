"""The notebooks: one a host, each run from its first cell to its last in a folder of its own, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
HOSTS = {"ultralytics": "ultralytics", "huggingface": "transformers", "easyocr": "easyocr", "lightning": "lightning"}


def cells(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])


def test_every_host_and_the_loop_have_a_notebook() -> None:
    assert {path.stem for path in NOTEBOOKS} == {*HOSTS, "loop"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_offline(path: Path, tmp_path: Path) -> None:
    if path.stem in HOSTS:
        pytest.importorskip(HOSTS[path.stem])
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code if cell["outputs"]] == []
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in code), encoding="utf-8")
    searched = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": searched, "ACCEL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.stem == "lightning" or next(tmp_path.rglob("accel_report.html"))
