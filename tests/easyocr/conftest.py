"""Small data sets and networks; the real weights where a case is about them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.render_lines import line
from integrations.easyocr.charset import characters_of
from integrations.easyocr.data import Skipped, keep_trainable, read_folder
from integrations.easyocr.settings import read_settings

CASES = Path(__file__).parent / "cases"
TINY = {"output_channel": 16, "hidden_size": 16}
STOCK_CHARACTERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

warnings.filterwarnings("ignore", message=".*pin_memory.*")
torch.set_num_threads(1)

Folder = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run measured is remembered for that test alone."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


def draw(text: str, seed: int = 0, font: str = "DejaVuSans") -> Image.Image:
    return line(text or " ", font, np.random.default_rng(seed))


def write_folder(folder: Path, labels: Sequence[str], seed: int = 0, font: str = "DejaVuSans") -> Path:
    """A plain folder: a picture a label, and labels.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["filename,words"]
    for number, label in enumerate(labels):
        draw(label, seed + number, font).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def numbers(count: int, seed: int = 0, longest: int = 7) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(map(str, rng.integers(0, 10, rng.integers(1, longest)))) for _ in range(count)]


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], Path]:
    """A case's folder with pictures beside its labels.csv."""

    def build(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "labels.csv").write_bytes((CASES / name / "labels.csv").read_bytes())
        for number in range(1, 6):
            draw("x", number).save(folder / f"{number}.png")
        return folder

    return build


@pytest.fixture(scope="session")
def stock() -> Path:
    """english_g2.pth as EasyOCR ships it."""
    models = pytest.importorskip("easyocr_en_models")
    return Path(models.__file__).parent / "models" / "english_g2.pth"


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run that takes a second: 24 number lines, 8 held out, a 16-channel network."""
    write_folder(tmp_path / "train", numbers(24))
    write_folder(tmp_path / "valid", numbers(8, seed=1), seed=100)
    return {
        "number": "0123456789",
        "experiment_name": "tiny_numbers",
        "train_data": str(tmp_path / "train"),
        "valid_data": str(tmp_path / "valid"),
        "output": str(tmp_path / "runs"),
        "imgH": 32,
        "batch_size": 4,
        "num_iter": 6,
        "valInterval": 3,
        "optim": "adam",
        "lr": 0.001,
        "progress": False,
        "tensorboard": False,
        "accel": {"precision": "fp32"},
        **TINY,
    }


def served(folder, **options):
    """Labels that a run over `folder` would train on."""
    settings, _ = read_settings(options)
    skipped = Skipped()
    lines = read_folder(folder, "train_data", skipped)
    characters = characters_of(settings, [line.label for line in lines.lines])
    return [line.label for line in keep_trainable(lines, characters, settings, skipped).lines], skipped


def rows_of(*pictures):
    """A Hugging Face data set of these pictures, each labelled 12."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict({"image": list(pictures), "text": ["12"] * len(pictures)}, features=features)
