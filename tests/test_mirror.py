"""Every plug and the loop on a second device: tests/mirrored, each part in a process of its own.

One import of tests/mirror.py makes `mirror` the accelerator of the whole process, which other tests would see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[1]
PARTS = sorted(p.stem for p in (ROOT / "tests" / "mirrored").glob("[!_]*.py") if p.stem != "conftest")


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch takes no device written in Python before 2.9",
)
@pytest.mark.parametrize("part", PARTS)
def test_part_passes_on_mirror(part: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/mirrored/{part}.py", "-p", "no:cacheprovider", "--show-capture=no"],
        cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def test_there_is_a_part_a_plug() -> None:
    assert {"loop", "trainer", "detector", "recognizer"} <= set(PARTS)
